#!/usr/bin/env bash
# The criterion of evidential c-means in evclust counts the outliers among the first three people
# alone.
#
# Packages: evclust 0.2.1, scipy 1.17.1, scikit-learn 1.9.1, pandas 3.1.1, numpy 2.4.6, matplotlib
#   3.11.2, seaborn 0.13.2.
# Behaviour: the second sum of the criterion goes over the mass that each object gives to the empty
#   set, which is what makes an outlier. The vector of these masses is cut to the number of focal
#   sets, three for two clusters and seven for three. All other objects cost nothing.
# Expected: sum of c^alpha m^beta d^2 over objects and sets, plus delta^2 times the sum of
#   m(empty)^beta over all objects.
# Why it matters here: the criterion ends the iterations and chooses the best of several trials, so
#   that the order of the rows decides, and values for several delta cannot be compared.
# Instead: compute the criterion from the masses and the centres that are returned.
# Source: Masson and Denoeux, ECM, an Evidential Version of the Fuzzy c-means Algorithm, Pattern
#   Recognition 2008, equation 15.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scipy==1.17.1' 'scikit-learn==1.9.1' 'pandas==3.1.1' 'numpy==2.4.6' 'matplotlib==3.11.2' 'seaborn==0.13.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'evclust==0.2.1'
cat > expected.txt <<'EXPECTED'
no outliers: criterion 43.3, by its definition 43.6, of which 0.3 for the empty set
three outliers first: criterion 310.8, by its definition 311.1, of which 238.9 for the empty set
three outliers last: criterion 72.2, by its definition 311.1, of which 238.9 for the empty set
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from evclust.ecm import ecm

random = np.random.default_rng(0)
people = np.concatenate([random.normal((0, 0), 0.5, (50, 2)), random.normal((6, 6), 0.5, (50, 2))])
far = np.array([[30.0, -30.0], [-30.0, 30.0], [40.0, 40.0]])


def right(result, x, delta=10):
    """Return the two sums of the criterion from the masses and the centres."""
    mass, sets = result['mass'], result['F'][1:]
    size = sets.sum(axis=1)
    centres = np.stack([result['g'][row == 1].mean(axis=0) for row in sets])
    distances = ((x[:, None] - centres[None]) ** 2).sum(axis=2)
    return (size * mass[:, 1:] ** 2 * distances).sum(), delta**2 * (mass[:, 0] ** 2).sum()


for label, x in (('no outliers', people), ('three outliers first', np.concatenate([far, people])), ('three outliers last', np.concatenate([people, far]))):
    result = ecm(x, 2, g0=np.array([[0.0, 0.0], [6.0, 6.0]]), alpha=1, beta=2, delta=10, disp=False)
    clusters, empty = right(result, x)
    print(f'{label}: criterion {result["crit"]:.1f}, by its definition {clusters + empty:.1f}, of which {empty:.1f} for the empty set')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

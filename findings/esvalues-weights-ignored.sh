#!/usr/bin/env bash
# esvalues takes weights for the people of its background, checks and normalises them, in the array of its
# caller, and never uses them: effects are those of an unweighted background.
#
# Packages: esvalues 0.4, numpy 1.26.4, scipy 1.17.1.
# Behaviour: the mean output, from which all effects are counted, and the mean output of each subset are plain
#   means over the rows, whatever the weights. The array of weights is divided by its sum in place.
# Expected: weighted means, for example of the centres of groups of different sizes, for which a background
#   with weights is made; and the caller's weights as they were.
# Instead: rows repeated as often as their weights say, as in the last lines.
# Source: Lundberg and Lee, A Unified Approach to Interpreting Model Predictions, NeurIPS 2017.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'esvalues==0.4'
cat > expected.txt <<'EXPECTED'
one each: start 7.0, effects 9.0 and 9.0; weighted by hand 7.0, 9.0 and 9.0; weights of the caller afterwards [0.5, 0.5]
900 and 100: start 7.0, effects 9.0 and 9.0; weighted by hand 1.4, 13.8 and 9.8; weights of the caller afterwards [0.9, 0.1]
100 and 900: start 7.0, effects 9.0 and 9.0; weighted by hand 12.6, 4.2 and 8.2; weights of the caller afterwards [0.1, 0.9]
rows repeated 9 times and once: start 1.4, effects 13.8 and 9.8
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from esvalues import esvalues


def model(people):
    return people @ np.array([3.0, 2.0])


person = np.array([[5.0, 5.0]])
groups = np.array([[0.0, 0.0], [4.0, 1.0]])  # the centres of a group of 900 and one of 100
for name, counts in (('one each', (1.0, 1.0)), ('900 and 100', (900.0, 100.0)), ('100 and 900', (100.0, 900.0))):
    weights = np.array(counts)
    base, effects, _ = esvalues(person, model, groups, weights=weights)
    centre = np.average(groups, axis=0, weights=counts)
    print(f'{name}: start {base:.1f}, effects {effects[0]:.1f} and {effects[1]:.1f}; weighted by hand '
          f'{float(model(centre[None])[0]):.1f}, {3 * (5 - centre[0]):.1f} and {2 * (5 - centre[1]):.1f}; '
          f'weights of the caller afterwards {weights.tolist()}')
repeated = np.repeat(groups, (9, 1), axis=0)
base, effects, _ = esvalues(person, model, repeated)
print(f'rows repeated 9 times and once: start {base:.1f}, effects {effects[0]:.1f} and {effects[1]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

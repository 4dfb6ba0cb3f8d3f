#!/usr/bin/env bash
# The nearest-neighbour measure of ConfClr never looks at the other class: as a failure, a value in the middle of the
# normal ones is as strange as one that is far from them.
#
# Packages: ConfClr 0.1.4, numpy 2.4.6, pandas 3.1.1, matplotlib 3.11.2, seaborn 0.13.2.
# Behaviour: the measure divides the distance to the nearest value of the same class by the one to the nearest value
#   of another class. The branch for the other class hangs on the wrong condition, so the second distance is one to
#   a value of the same class as well. Where the normal values are changes nothing for a failure.
# Expected: a large measure near the other class.
# Why it matters here: the p-values from it decide whether a machine is reported as failed.
# Instead: the measure by hand, as below.
# Source: Shafer and Vovk (2008), "A tutorial on conformal prediction", section 4.2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ConfClr==0.1.4' 'numpy==2.4.6' 'pandas==3.1.1' 'matplotlib==3.11.2' 'seaborn==0.13.2'
cat > expected.txt <<'EXPECTED'
failures around 0 degrees, normal values around 45, measure of a failure at 45: ConfClr 0.7, by hand 2.52e+05
failures around 0 degrees, normal values around 90, measure of a failure at 45: ConfClr 0.7, by hand 2.24
failures around 0 degrees, normal values around 180, measure of a failure at 45: ConfClr 0.7, by hand 0.0857
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ConfClr import ConfClr

predictor = ConfClr()
random = np.random.default_rng(0)


def draw(angle, values):
    """Draw vectors around an angle, since the distance of ConfClr is the one of directions."""
    angles = np.radians(random.normal(angle, 12, values))
    return np.column_stack([np.cos(angles), np.sin(angles)]).tolist()


def measure_by_hand(known, at):
    vector, kind = known[at]
    distances = {True: [], False: []}
    for other, (value, label) in enumerate(known):
        if other != at:
            distances[label == kind].append(predictor.cosineSimilarity(value, vector))
    return min(distances[True]) / min(distances[False])


failures = [(vector, 'failed') for vector in draw(0, 40)]
new = ([np.cos(np.radians(45)), np.sin(np.radians(45))], 'failed')
for angle in (45, 90, 180):
    known = failures + [(vector, 'normal') for vector in draw(angle, 40)]
    found = []
    for measure in (predictor.NearestNeighbour, measure_by_hand):
        found.append(measure([*known, new], len(known)))
    print(f'failures around 0 degrees, normal values around {angle}, measure of a failure at 45: ConfClr {found[0]:.3g}, '
          f'by hand {found[1]:.3g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

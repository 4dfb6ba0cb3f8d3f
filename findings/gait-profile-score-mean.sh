#!/usr/bin/env bash
# The gait profile score of gait-profile-score is a mean of the scores of the joints where the method is
# their root mean square.
#
# Packages: gait-profile-score 1.0.2, numpy 1.26.4, scipy 1.13.1, pandas 2.3.3,
#   matplotlib 3.9.4.
# Behaviour: the package calculates the score "as stated in Baker et al. 2009", which is the root mean
#   square difference over all variables and the whole gait cycle. The scores of the variables are root
#   mean squares, and calculateGPS takes their arithmetic mean. Where all joints are off by the same the
#   two agree; a gait with one stiff knee of 40 degrees has a score of 2.2 in place of 9.4.
# Expected: the square root of the mean of the squared scores.
# Instead: compute it from the eighteen scores, which are right.
# Source: Baker et al., The Gait Profile Score and Movement Analysis Profile, 2009.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1' 'pandas==2.3.3' 'matplotlib==3.9.4' 'gait-profile-score==1.0.2'
cat > expected.txt <<'EXPECTED'
all angles 5 degrees off: left 5.00, all 5.00; root mean square: left 5.00, all 5.00
one knee 40 degrees off: left 4.44, all 2.22; root mean square: left 13.33, all 9.43
both ankles 30 and all others 2 degrees off: left 5.11, all 5.11; root mean square: left 10.18, all 10.18
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from gpscalculator import calculateGPS, exampleInputData

labels = exampleInputData().kinematicVariables()
reference = {label: [0.0] * 100 for label in labels}
people = {
    'all angles 5 degrees off': {label: 5.0 for label in labels},
    'one knee 40 degrees off': {label: 40.0 * (label == 'Knee Flexion Left') for label in labels},
    'both ankles 30 and all others 2 degrees off': {label: 30.0 if 'Ankle' in label else 2.0 for label in labels},
}
for name, angles in people.items():
    seen = calculateGPS(reference, {label: [angle] * 100 for label, angle in angles.items()}).gps
    left = [angles[label] for label in labels if 'Left' in label]
    print(f"{name}: left {seen['GPS Left']:.2f}, all {seen['GPS']:.2f};",
          f'root mean square: left {np.sqrt(np.mean(np.square(left))):.2f}, all {np.sqrt(np.mean(np.square(list(angles.values())))):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

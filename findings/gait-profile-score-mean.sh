#!/usr/bin/env bash
# The gait profile score of gait-profile-score is the mean of its variables where the paper that it cites takes the root of
# the mean square, and counts the pelvis twice: a child with one stiff knee has 2.4 degrees in place of 8.2.
#
# Packages: gait-profile-score 1.0.2, numpy 1.26.4.
# Behaviour: the score of each variable is the root mean square difference from the reference. The score of the whole gait
#   and of each side is the arithmetic mean of these, over all 18 variables. Deviations in few joints are thus made small.
# Expected: the root of the mean of the squares, of 15 variables for the overall score: the three of the pelvis, which both
#   sides share, once, and six of each leg.
# Why it matters here: the published scores, the differences that count as important and the normal values belong to the
#   root mean square, and a mean is never larger.
# Instead: numpy.sqrt(numpy.mean(numpy.square(values))) of the scores of the variables.
# Source: Baker and others, The gait profile score and movement analysis profile, Gait and Posture 30 (2009), which the
#   description of the package cites: the root mean square of 15 variables, and of 9 for one side.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'gait-profile-score==1.0.2'
cat > expected.txt <<'EXPECTED'
all 5 degrees off: overall 5.0, by the paper 5.0 (15 variables); left 5.0, by the paper 5.0
stiff left knee: overall 2.4, by the paper 8.2 (15 variables); left 4.9, by the paper 10.5
tilted pelvis: overall 5.0, by the paper 6.7 (15 variables); left 5.0, by the paper 8.7
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from calculations import blankKinematicsDict, calculateGPSvalues

def score(changes):
    reference, subject = blankKinematicsDict(), blankKinematicsDict()
    for name, degrees in changes.items():
        subject[name] = [degrees] * 100
    return calculateGPSvalues(reference, subject)

def root(values):
    return np.sqrt(np.mean(np.square(values)))

gaits = {
    'all 5 degrees off': dict.fromkeys(blankKinematicsDict(), 5),
    'stiff left knee': {'Knee Flexion Left': 30, 'Hip Flexion Left': 8, 'Ankle Dorsiflexion Left': 6},
    'tilted pelvis': {f'Pelvic {kind} {side}': 15 for kind in ('Tilt', 'Obliquity', 'Rotation') for side in ('Left', 'Right')},
}
for name, changes in gaits.items():
    seen = score(changes)
    joints = {key: value for key, value in seen.items() if 'GPS' not in key}
    fifteen = [value for key, value in joints.items() if not (key.startswith('Pelvic') and key.endswith('Right'))]
    left = [value for key, value in joints.items() if key.endswith('Left')]
    print(f"{name}: overall {seen['GPS']:.1f}, by the paper {root(fifteen):.1f} ({len(fifteen)} variables);",
          f"left {seen['GPS Left']:.1f}, by the paper {root(left):.1f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

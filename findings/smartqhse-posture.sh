#!/usr/bin/env bash
# The posture scores of smartqhse-hse-calculators are sums where REBA and RULA look their parts up in
# tables: nobody has an acceptable posture.
#
# Packages: smartqhse-hse-calculators 0.1.0.
# Behaviour: calculate_reba and calculate_rula name the published methods, in which the parts of the body
#   are combined by three tables. They add the parts up. The best posture there is, upright with hanging
#   arms and no load, has a REBA score of 6, for which a change is required, in place of 1, and a RULA
#   score of 3 in place of 1. An ordinary one at a desk has the highest RULA score, 7, for immediate
#   changes, in place of 3.
# Expected: tables A, B and C of the methods. The entries that are used here are in the script.
# Instead: look the scores up in the tables.
# Source: Hignett and McAtamney, Rapid Entire Body Assessment, 2000; McAtamney and Corlett, RULA, 1993.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'smartqhse-hse-calculators==0.1.0'
cat > expected.txt <<'EXPECTED'
REBA, upright with hanging arms and no load: score 6, medium, Further investigation and change required; by its tables 1, negligible
REBA, neck 2, trunk 3, legs 1, upper arm 2, lower arm 1, wrist 2: score 11, veryHigh; by its tables 4, medium
RULA, the same: score 3, level 2, Further investigation, changes may be needed; by its tables 1, level 1
RULA, upper arm 2, lower arm 2, wrist 2, neck 2: score 7, level 4; by its tables 3, level 2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from smartqhse_hse_calculators import calculate_reba, calculate_rula

best = calculate_reba(neck=1, trunk=1, legs=1, upper_arm=1, lower_arm=1, wrist=1)
print(f"REBA, upright with hanging arms and no load: score {best['score']}, {best['risk']}, {best['action']}; by its tables 1, negligible")
bent = calculate_reba(neck=2, trunk=3, legs=1, upper_arm=2, lower_arm=1, wrist=2)
print(f"REBA, neck 2, trunk 3, legs 1, upper arm 2, lower arm 1, wrist 2: score {bent['score']}, {bent['risk']}; by its tables 4, medium")
easy = calculate_rula(upper_arm=1, lower_arm=1, wrist=1, wrist_twist=1, neck=1, trunk=1, legs=1)
print(f"RULA, the same: score {easy['score']}, level {easy['action_level']}, {easy['action']}; by its tables 1, level 1")
desk = calculate_rula(upper_arm=2, lower_arm=2, wrist=2, wrist_twist=1, neck=2, trunk=1, legs=1)
print(f"RULA, upper arm 2, lower arm 2, wrist 2, neck 2: score {desk['score']}, level {desk['action_level']}; by its tables 3, level 2")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

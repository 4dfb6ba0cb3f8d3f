#!/usr/bin/env bash
# eyetestutils changes a prescription with a plus cylinder at axis 90 into one that is turned by a right angle: the axis
# of 90 stays where every other one moves by 90 degrees.
#
# Packages: eyetestutils 0.1.1.
# Behaviour: EyeTestValidator.power_format writes a prescription with a plus cylinder as one with a minus cylinder: it
#   adds the cylinder to the sphere, changes its sign and turns the axis. It adds 90 to an axis below 90 and takes 90 from
#   one above 90. An axis of exactly 90, which is among the most frequent ones, is in neither case and is not turned.
# Expected: 180, the same lens as before. Axes of 89 and 91 become 179 and 1.
# Why it matters here: the lens has its whole cylinder in the wrong meridian: +1.00 +2.00 x 90 has +1.00 dioptres along
#   90 degrees and +3.00 along 180, and the returned +3.00 -2.00 x 90 has +3.00 and +1.00.
# Instead: set an axis of 90 to 180 before the call if the cylinder is positive.
# Source: the power of a lens in the meridian at an angle t is sphere + cylinder * sin^2(t - axis); a transposition keeps
#   it for each t.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'eyetestutils==0.1.1'
cat > expected.txt <<'EXPECTED'
+1.00 +2.00 x 45: +03.00 -02.00 x 135, off by up to 0.00 dioptres
+1.00 +2.00 x 89: +03.00 -02.00 x 179, off by up to 0.00 dioptres
+1.00 +2.00 x 90: +03.00 -02.00 x 90, off by up to 2.00 dioptres
+1.00 +2.00 x 91: +03.00 -02.00 x 1, off by up to 0.00 dioptres
+1.00 +2.00 x 180: +03.00 -02.00 x 90, off by up to 0.00 dioptres
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import radians, sin

from eyetools import EyeTestValidator

def power(lens, angle):
    return float(lens['SPH']) + float(lens['CY']) * sin(radians(angle - float(lens['AX']))) ** 2

for axis in ('45', '89', '90', '91', '180'):
    before = {'SPH': '+1.00', 'CY': '+2.00', 'AX': axis}
    after = EyeTestValidator().power_format(before)
    largest = max(abs(power(before, angle) - power(after, angle)) for angle in range(180))
    print(f"+1.00 +2.00 x {axis}: {after['SPH']} {after['CY']} x {after['AX']}, off by up to {largest:.2f} dioptres")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

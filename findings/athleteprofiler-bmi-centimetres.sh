#!/usr/bin/env bash
# The body mass index of athleteprofiler divides by the height in centimetres: 0.00167 kg/m2 in place of 16.7 for the first
# of its own examples.
#
# Packages: athleteprofiler 0.1.1.
# Behaviour: the class documents its height as [cm] and its examples have 188 and 198. get_bmi divides the weight by the
#   square of it and calls the result kg/m2. With a height in metres the index is right, and everything else of the profile
#   contradicts it.
# Expected: the height divided by 100.
# Instead: multiply the index by 10,000.
# Source: the docstring of get_bmi: "resulting from mass in kilograms and height in metres".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'athleteprofiler==0.1.1'
cat > expected.txt <<'EXPECTED'
188 cm, 59 kg: athleteprofiler 0.00167 kg/m2, by hand 16.7
198 cm, 96 kg: athleteprofiler 0.00245 kg/m2, by hand 24.5
165 cm, 90 kg: athleteprofiler 0.00331 kg/m2, by hand 33.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from athleteprofiler import Athlete

for height, weight in ((188, 59), (198, 96), (165, 90)):
    athlete = Athlete('Ada Example', '1990-01-01', 'F', height, weight, 50, 'rowing', '')
    print(f'{height} cm, {weight} kg: athleteprofiler {athlete.get_bmi()} kg/m2, by hand {weight / (height / 100) ** 2:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

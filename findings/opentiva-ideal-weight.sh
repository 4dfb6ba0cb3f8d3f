#!/usr/bin/env bash
# opentiva adds to the ideal weight for each centimetre what belongs to each inch: a man of 180 cm has an
# ideal weight of 113 kg, and a creatinine clearance that is half as large again.
#
# Packages: opentiva 1.1.2, numpy 1.26.4, scipy 1.13.1. The script uses the source, since its compiled part,
#   which is not part of this and an empty module stands in for, does not build on Python 3.11.
# Behaviour: crcl_cockcroft_gault uses the ideal weight from a body mass index of 18.5 on, as 50 or 45.5 kg
#   and 2.3 kg for each centimetre above 152.4. The clearance grows with the error of the weight: 75 in
#   place of 50 mL/min, which is another stage of kidney disease. ffm_alsallami has 1 - 0.8 in place of
#   1 - 0.88, so the fat free mass of each man is 8 % above the one it is made from.
# Expected: 2.3 kg for each inch above 60 inches: 75 kg at 180 cm. A factor of 1 for adult men.
# Why it matters here: doses follow the clearance; the fat free mass is the size of a propofol model.
# Instead: 2.3 * (height - 152.4) / 2.54, and ffm_janmahasation for adults.
# Source: Devine (1974) for the ideal weight; Cockcroft and Gault (1976); Al-Sallami et al., Clin
#   Pharmacokinet 54 (2015) 1169, for the fat free mass.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip download -q -q --no-deps --no-binary :all: 'opentiva==1.1.2'
tar xzf opentiva-1.1.2.tar.gz
export PYTHONPATH="$folder/opentiva-1.1.2"
cat > expected.txt <<'EXPECTED'
man of 70, 180 cm, 75 kg: clearance 75, by the ideal weight 50; ideal weight 113 kg, Devine 75 kg
man of 70, 170 cm, 70 kg: clearance 60, by the ideal weight 44; ideal weight 90 kg, Devine 66 kg
woman of 70, 165 cm, 60 kg: clearance 42, by the ideal weight 32; ideal weight 74 kg, Devine 57 kg
woman of 70, 155 cm, 48 kg: clearance 29, by the ideal weight 27; ideal weight 51 kg, Devine 48 kg
man of 40: fat free mass over the one for adults 1.080, published 1.000
woman of 40: fat free mass over the one for adults 1.014, published 1.014
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from unittest.mock import MagicMock

sys.modules['opentiva.pkpd'] = MagicMock()
from opentiva.biometrics import crcl_cockcroft_gault, ffm_alsallami, ffm_janmahasation

for name, sex, weight, height in (
    ('man', 0, 75, 180), ('man', 0, 70, 170), ('woman', 1, 60, 165), ('woman', 1, 48, 155),
):
    age, creatinine = 70, 130
    ideal = (50, 45.5)[sex] + 2.3 * (height - 152.4) / 2.54
    per_weight = (140 - age) * (1, 0.85)[sex] / (72 * creatinine / 88.42)
    seen = crcl_cockcroft_gault(sex, age, weight, height, creatinine)
    print(f'{name} of 70, {height} cm, {weight} kg: clearance {seen:.0f}, by the ideal weight',
          f'{per_weight * ideal:.0f}; ideal weight {seen / per_weight:.0f} kg, Devine {ideal:.0f} kg')
for sex, name in ((0, 'man'), (1, 'woman')):
    ratio = ffm_alsallami(sex, 40, 70, 170) / ffm_janmahasation(sex, 70, 170)
    print(f'{name} of 40: fat free mass over the one for adults {ratio:.3f},',
          f'published {(0.88 + 0.12 / (1 + (40 / 13.4) ** -12.7), 1.11 - 0.11 / (1 + (40 / 7.1) ** -1.1))[sex]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# quantulum3 reads a blood pressure of 120/80 mmHg as 1.5 mmHg, and other quantities of clinical
# notes as other ones.
#
# Packages: quantulum3 0.10.0, inflect 7.6.0, num2words 0.5.14.
# Behaviour: two numbers with a slash are a fraction, with a unit behind them too. A decimal comma
#   separates two numbers, of which the second has the unit: 1,5 mg gives 1 and 5 mg. "mmol" is read
#   letter by letter as metre and mole, "bpm" as base pair and metre, "F" is the farad, and "<5
#   ng/ml" loses its unit and its sign. Each comes as a quantity with value and unit like the right
#   ones for mg/dl and kg; no warning, no confidence.
# Expected: a pair, one dose, mmol/l, or no quantity where a text is not understood.
# Why it matters here: numbers taken from notes become columns.
# Instead: a grammar of your own for each kind of line, checked against plausible bounds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'quantulum3==0.10.0' 'inflect==7.6.0' 'num2words==0.5.14'
cat > expected.txt <<'EXPECTED'
weight 70 kg: 70 kilogram
creatinine 1.2 mg/dl: 1.2 milligram per decilitre
BP 120/80 mmHg: 1.5 millimeter of mercury
1,5 mg of warfarin: 1 dimensionless; 5 milligram
temp 37,5 °C: 37 dimensionless; 5 degree Celsius
glucose 5.4 mmol/l: 5.4 metre mole per litre
troponin <5 ng/ml: 5 dimensionless
pulse 80 bpm: 80 base pair metre
temp 98.6 F: 98.6 farad
10^6 copies/ml: 10 dimensionless; 6 dimensionless
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from quantulum3 import parser

for text in (
    'weight 70 kg', 'creatinine 1.2 mg/dl', 'BP 120/80 mmHg', '1,5 mg of warfarin', 'temp 37,5 °C',
    'glucose 5.4 mmol/l', 'troponin <5 ng/ml', 'pulse 80 bpm', 'temp 98.6 F', '10^6 copies/ml',
):
    quantities = '; '.join(f'{quantity.value:g} {quantity.unit.name}' for quantity in parser.parse(text))
    print(f'{text}: {quantities}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

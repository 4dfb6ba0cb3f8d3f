#!/usr/bin/env bash
# devicecodex converts kilograms to kilograms by 0.45 and centimetres to centimetres by 2.54, since it does
# not look at the unit that it is given.
#
# Packages: devicecodex 0.0.2.
# Behaviour: convert_value(code, value, source_unit) converts to the unit of its table from the one that it
#   takes for granted: pounds, inches, Fahrenheit, miles, kilojoules and litres a second. source_unit is
#   documented as unused. Its check of values passes the results: a person of 70 kg is one of 31.8 kg.
# Expected: a value that has the unit already is returned as it is, and an unknown unit raises an error.
# Why it matters here: data of several devices are pooled, and half of them become outliers that bounds
#   clamp.
# Instead: compare the unit of the observation with LOINC_EXPECTED_UNITS first, and convert by pint.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'devicecodex==0.0.2'
cat > expected.txt <<'EXPECTED'
weight, 70 kg: 31.8 kg, accepted
height, 80 cm: 203.2 cm, accepted
temperature, 98.6 Cel: 37.0 Cel, accepted
temperature, 37 Cel: 2.8 Cel, out of range
energy burned, 2000 kcal: 478.0 kcal, accepted
peak flow, 450 L/min: 27000.0 L/min, out of range
blood pressure, 120 mmHg: 120.0 mmHg, accepted
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from devicecodex.interop.expected_units import LOINC_EXPECTED_UNITS
from devicecodex.transforms import convert_value
from devicecodex.validation import is_valid_value

for name, code, value in (
    ('weight', '29463-7', 70), ('height', '8302-2', 80), ('temperature', '8310-5', 98.6),
    ('temperature', '8310-5', 37), ('energy burned', '41979-6', 2000), ('peak flow', '33452-4', 450),
    ('blood pressure', '8480-6', 120),
):
    unit = LOINC_EXPECTED_UNITS[code]
    seen = convert_value(code, value, source_unit=unit)
    print(f'{name}, {value} {unit}: {seen:.1f} {unit},',
          'accepted' if is_valid_value(code, seen) else 'out of range')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

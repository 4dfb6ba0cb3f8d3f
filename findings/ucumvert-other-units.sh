#!/usr/bin/env bash
# ucumvert takes valid UCUM codes for other units: a Calorie becomes a thousandth of it, a cubic foot
# a length, gram per cent a mass, and a prism dioptre 25 turns.
#
# Packages: ucumvert 0.3.2, Pint 0.25.3.
# Behaviour: [Cal] is read as the small calorie, [cft_i] (cubic foot) as hundredths of a foot, g% (in
#   UCUM: g/dL) as gram times 0.01, ' (minute of arc) as a minute of time, and [p'diop] (an angle
#   whose tangent is 1/100) as the tangent of 1 times 100. No code is refused.
# Expected: the value of each code in UCUM's own table, which the package ships.
# Instead: map these codes by hand before reading: [Cal] to kcal, g% to g/dL.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ucumvert==0.3.2' 'Pint==0.25.3'
cat > expected.txt <<'EXPECTED'
[Cal] is 4184 joule, read as 4.18 kilogram * meter ** 2 / second ** 2
[cft_i] is 0.0283 cubic metres, read as 0.00305 meter
g% is 10 kilogram per cubic metre, read as 1e-05 kilogram
' is 0.000291 radian, read as 60 second
[p'diop] is 0.01 radian, read as 156 dimensionless
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ucumvert import PintUcumRegistry

registry = PintUcumRegistry()
for code, meaning in (
    ('[Cal]', '4184 joule'),
    ('[cft_i]', '0.0283 cubic metres'),
    ('g%', '10 kilogram per cubic metre'),
    ("'", '0.000291 radian'),
    ("[p'diop]", '0.01 radian'),
):
    print(f'{code} is {meaning}, read as {registry.from_ucum(code).to_base_units():.3g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

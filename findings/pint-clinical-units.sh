#!/usr/bin/env bash
# pint reads units of insulin as a luminance, dioptres as a volume and the French of a catheter as a
# charge.
#
# Packages: pint 0.25.3.
# Behaviour: pint puts a prefix before any unit that it knows, so "unit" is u (micro) and nit, a
#   candela per square metre, with the plural too, and "dpt" is d (deci) and pt, a pint. "U" is the
#   enzyme unit, µmol per minute, also behind insulin or heparin; "Fr" is the franklin, "bp" a
#   printer's point and "a" a year. A dose is computed without a complaint as long as nobody
#   converts it, and is printed in micronit. "IU", "mEq", "mOsm" and "bpm" are unknown and raise an
#   error, as all of these should.
# Expected: an error, or an arbitrary unit of its own for "unit" and "U".
# Instead: a registry with your own definitions, such as "arbitrary_unit = [arbitrary] = U = unit",
#   and an explicit list of texts that are allowed.
# Source: UCUM: [arb'U], [iU], [diop], [Ch] and U are different units.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pint==0.25.3'
cat > expected.txt <<'EXPECTED'
insulin, 10 units: micronit, 1e-05 candela / meter ** 2
red cells, 1 unit: micronit, 1e-06 candela / meter ** 2
heparin, 5000 U: enzyme_unit, 8.33e-05 mole / second
glasses, 1 dpt: decipint, 4.73e-05 meter ** 3
catheter, 14 Fr: franklin, 0.000443 kilogram ** 0.5 * meter ** 1.5 / second
blood pressure, 120 bp: point, 0.0423 meter
vitamin D, 3 IU: error, 'IU' is not defined in the unit registry
potassium, 40 mEq: error, 'mEq' is not defined in the unit registry
dose: 30.0 micronit
glasses of 2 dpt as a volume: 94.6 milliliter
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pint

registry = pint.UnitRegistry()
for text, meaning in (
    ('10 units', 'insulin'), ('1 unit', 'red cells'), ('5000 U', 'heparin'), ('1 dpt', 'glasses'),
    ('14 Fr', 'catheter'), ('120 bp', 'blood pressure'), ('3 IU', 'vitamin D'), ('40 mEq', 'potassium'),
):
    try:
        quantity = registry(text)
    except pint.UndefinedUnitError as error:
        print(f'{meaning}, {text}: error, {error}')
        continue
    print(f'{meaning}, {text}: {quantity.units}, {quantity.to_base_units():.3g}')
print('dose:', registry('100 units/mL') * registry('0.3 mL'))
print('glasses of 2 dpt as a volume:', f"{registry('2 dpt').to('mL'):.1f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

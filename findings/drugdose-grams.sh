#!/usr/bin/env bash
# drugdose computes doses in grams as if they were milligrams.
#
# Packages: drugdose 0.1.2.
# Behaviour: the doses of its table are in mg, mcg, g, mEq or units; calculate_dose converts mcg only and
#   takes every other unit for milligrams. 2 g of calcium gluconate are "2.00 mg", and the volume to draw
#   up 0.02 mL in place of 20 mL; glucose for a hypoglycaemia is a thousandth of it, and 5600 units of
#   heparin are "5600.00 mg". calculate_drip compares the numbers of a dose and its limit whatever their
#   units: ten times the largest dose of dopamine passes where it is given in mg/min.
# Expected: grams times 1000, and no milligrams for units; a limit in the unit of the dose.
# Instead: read RouteConfig.dose_unit, and convert the dose yourself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'drugdose==0.1.2'
cat > expected.txt <<'EXPECTED'
calcium_gluconate: up to 2.0 g of 100.0 mg/mL -> 2.00 mg → 0.02 mL
magnesium_sulfate: up to 50.0 mg/kg of 200.0 mg/mL -> 2000.00 mg → 10.00 mL
dextrose: up to 1.0 g/kg of 500.0 mg/mL -> 70.00 mg → 0.14 mL
heparin: up to 80.0 units/kg  -> 5600.00 mg
dopamine: up to 20.0 mcg/kg/min
  14 mg/min = 200 mcg/kg/min: above the limit False
  700 mcg/min = 10 mcg/kg/min: above the limit True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from drugdose import Patient, calculate_dose, calculate_drip, get_drug

patient = Patient(weight_kg=70, age_years=60, sex='M')
for name in ('calcium_gluconate', 'magnesium_sulfate', 'dextrose', 'heparin'):
    route = next(route for route in get_drug(name).routes if route.route == 'IV')
    dose = calculate_dose(name, patient, 'IV')
    strength = f'of {route.standard_concentration_mg_ml} mg/mL' if route.standard_concentration_mg_ml else ''
    print(f'{name}: up to {route.dose_max} {route.dose_unit} {strength} ->', dose.summary().split(': ')[1])
limit = next(route for route in get_drug('dopamine').routes if route.continuous_infusion)
print(f'dopamine: up to {limit.dose_max} {limit.dose_unit}')
for dose, unit in ((14, 'mg/min'), (700, 'mcg/min')):
    drip = calculate_drip('dopamine', patient, dose, unit)
    print(f'  {dose} {unit} = {1000 * drip.dose_mg_per_min / 70:.0f} mcg/kg/min:',
          f'above the limit {drip.rate_exceeded}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# drugdose calculates an infusion of heparin a thousand times too fast.
#
# Packages: drugdose 0.1.2, Python 3.11.
# Behaviour: calculate_drip looks for 'g/hr' in the unit of the dose to find grams, and finds it in
#   'units/kg/hr' as well, the unit that its own list has for heparin and insulin: the rate is
#   multiplied by 1000. The comparison with the highest dose changes hours to minutes and nothing
#   else, so a dose in mg/kg/min is compared with a limit in mcg/kg/min.
# Expected: 18 units/kg/hr for 80 kg from a bag of 100 units/mL are 14.4 mL/hr. 0.1 mg/kg/min of
#   dopamine are 100 mcg/kg/min, five times the highest dose of the list.
# Why it matters here: a tool that turns orders into rates, or prepares such columns for a model,
#   gives no error; a warning names the rate only above 999 mL/hr.
# Instead: convert units of heparin and insulin by hand; give doses in the unit that the list has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'drugdose==0.1.2'
cat > expected.txt <<'EXPECTED'
heparin, 18.0 units/kg/hr: 14400.0 mL/hr, by hand 14.4
insulin_regular, 0.1 units/kg/hr: 8000.0 mL/hr, by hand 8.0
vasopressin, 0.03 units/min: 9.0 mL/hr, by hand 9.0
dopamine, 10.0 mcg/kg/min: 30.0 mL/hr, by hand 30.0
highest dose of dopamine: 20.0 mcg/kg/min
100.0 mcg/kg/min: 300 mL/hr, above the highest dose: True
0.1 mg/kg/min: 300 mL/hr, above the highest dose: False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from drugdose import Patient, calculate_drip, get_drug

patient = Patient(weight_kg=80.0)
for drug, dose, unit, concentration, factor in (
        ('heparin', 18.0, 'units/kg/hr', 100.0, 80.0), ('insulin_regular', 0.1, 'units/kg/hr', 1.0, 80.0),
        ('vasopressin', 0.03, 'units/min', 0.2, 60.0), ('dopamine', 10.0, 'mcg/kg/min', 1.6, 60 * 80 / 1000)):
    seen = calculate_drip(drug, patient, dose, unit, concentration_mg_ml=concentration)
    print(f'{drug}, {dose} {unit}: {seen.rate_ml_per_hr:.1f} mL/hr, by hand {dose * factor / concentration:.1f}')
highest = next(route for route in get_drug('dopamine').routes if route.continuous_infusion)
print(f'highest dose of dopamine: {highest.dose_max} {highest.dose_unit}')
for dose, unit in ((100.0, 'mcg/kg/min'), (0.1, 'mg/kg/min')):
    seen = calculate_drip('dopamine', patient, dose, unit, concentration_mg_ml=1.6)
    print(f'{dose} {unit}: {seen.rate_ml_per_hr:.0f} mL/hr, above the highest dose: {seen.rate_exceeded}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

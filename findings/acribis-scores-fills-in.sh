#!/usr/bin/env bash
# The Barcelona heart failure score of acribis-scores writes into the record of the patient that it is given: missing
# values are then there as if they had been measured, and high and low ones are cut.
#
# Packages: acribis-scores 0.4.0, pandas 3.1.1, numpy 2.4.6.
# Behaviour: calc_barcelona_hf_score limits values to the range of its model and puts the median of its own cohort in the
#   place of missing ones, as the calculator it follows does. It does so in the dictionary of the caller. A woman of 96 whose ejection fraction
#   and haemoglobin were not measured is 90.9 years old afterwards, with 35 % and 12.9 g/dL.
# Expected: the same record after the call, as with the other scores of the package, which copy it.
# Why it matters here: a second score that is computed from the record finds invented measurements, and so does a table
#   that is stored after it: nobody can tell any more what was missing.
# Instead: pass copy.deepcopy(record).
# Source: the other functions of the package, such as calc_smart_score, which start with a copy of their parameters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'acribis-scores==0.4.0' 'numpy==2.4.6' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
Age (years): before 96, after 90.92
Ejection fraction (%): before missing, after 35
HF Duration in months: before missing, after 6
Hemoglobin (g/dL): before missing, after 12.9
Hospitalisation Prev. Year: before 9, after 5.71
Sodium (mmol/L): before missing, after 138
eGFR in mL/min/1.73m²: before missing, after 60.61
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
from acribis_scores.barcelona_hf_v3 import calc_barcelona_hf_score

record = {
    'Age (years)': 96, 'Female': True, 'NYHA Class': 3, 'Loop Diuretic Furosemide Dose': 40, 'Loop Diuretic Torasemide Dose': 0,
    'Statin': False, 'ACEi/ARB': True, 'Betablockers': True, 'Diabetes Mellitus': False, 'Hospitalisation Prev. Year': 9,
    'MRA': False, 'ICD': False, 'CRT': False, 'ARNI': False, 'SGLT2i': False,
}
before = dict(record)
with contextlib.redirect_stdout(io.StringIO()):
    calc_barcelona_hf_score(record)
for key in sorted(record):
    if record[key] != before.get(key, 'missing'):
        print(f'{key}: before {before.get(key, "missing")}, after {record[key]:.4g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

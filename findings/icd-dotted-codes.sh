#!/usr/bin/env bash
# icd finds the comorbidities of ICD-10 codes with a dot where three characters decide, and no
# others.
#
# Packages: icd 0.1.3, pandas 1.5.3, numpy 1.26.4.
# Behaviour: its maps of Charlson and Elixhauser hold codes without a dot, such as I50 and E119, and
#   a diagnosis counts where it contains one of them. I50.9 contains I50; E11.9 does not contain
#   E119. In a table with dots, as most hospitals write ICD-10, the conditions that need a fourth
#   character are missing for every patient, and those of three characters are right.
# Expected: the same conditions with and without the dot, or no condition at all, which would be
#   noticed.
# Why it matters here: the score of a whole cohort is too low, and diabetics look like healthy
#   people.
# Instead: remove the dots first; count each condition over the cohort and compare it with its
#   prevalence.
# Source: Quan et al., Coding algorithms for defining comorbidities in ICD-9-CM and ICD-10 data
#   (2005).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'icd==0.1.3' 'pandas==1.5.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
I50.9: without dot congestive_heart_failure, with dot congestive_heart_failure
E11.9: without dot diabetes_wo_complications, with dot -
E11.2: without dot diabetes_w_complications, with dot -
I12.0: without dot renal_disease, with dot -
K70.3: without dot mild_liver_disease, with dot -
J45.0: without dot chronic_pulmonary_disease, with dot chronic_pulmonary_disease
F03.9: without dot dementia, with dot dementia
K76.6: without dot moderate_or_sever_liver_disease, with dot -
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from icd import icd_to_comorbidities

codes = ['I50.9', 'E11.9', 'E11.2', 'I12.0', 'K70.3', 'J45.0', 'F03.9', 'K76.6']
plain = pd.DataFrame({'patient': codes, 'code': [code.replace('.', '') for code in codes]})
dotted = pd.DataFrame({'patient': codes, 'code': codes})
found = [icd_to_comorbidities(table, 'patient', ['code'], mapping='charlson10') for table in (plain, dotted)]
for code in codes:
    names = ['; '.join(name for name in table.columns[:-1] if table.loc[code, name]) for table in found]
    print(f'{code}: without dot {names[0] or "-"}, with dot {names[1] or "-"}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

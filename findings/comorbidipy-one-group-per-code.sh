#!/usr/bin/env bash
# comorbidipy counts a code that belongs to two groups for the last of them only: hypertensive heart disease with heart
# failure, I11.0, has an Elixhauser score of 0 in place of 7.
#
# Packages: comorbidipy 0.5.0, pandas 2.2.3, numpy 1.26.4. Its import needs a warning that pandas has moved.
# Behaviour: a dictionary from codes to groups is filled group by group, so that each code keeps one. By the lists of
#   the package itself I11.0 is in heart failure and in complicated hypertension, K70.3 in liver disease and alcohol abuse,
#   F31.5 in psychoses and depression.
# Expected: both groups, as from the R package comorbidity, of which it is a rewrite.
# Why it matters here: I11.0 is how heart failure is coded in people with hypertension, and the score adjusts hospital
#   mortality.
# Instead: look the codes up in comorbidipy.mapping group by group, as below.
# Source: Quan and others (2005), "Coding algorithms for defining comorbidities in ICD-9-CM and ICD-10 administrative
#   data", Medical Care 43(11), table 2; weights of van Walraven and others (2009), Medical Care 47(6).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'comorbidipy==0.5.0' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
I110, heart failure with hypertension: groups ['hypc'], score 0; by its lists ['chf', 'hypc'], score 7
K703, alcoholic cirrhosis: groups ['alcohol'], score 0; by its lists ['ld', 'alcohol'], score 11
I426, alcoholic cardiomyopathy: groups ['alcohol'], score 0; by its lists ['chf', 'alcohol'], score 7
I50, heart failure: groups ['chf'], score 7; by its lists ['chf'], score 7
K746, other cirrhosis: groups ['ld'], score 11; by its lists ['ld'], score 11
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pandas.core.common

pandas.core.common.SettingWithCopyWarning = pd.errors.SettingWithCopyWarning

from comorbidipy import comorbidity
from comorbidipy.mapping import mapping
from comorbidipy.weights import weights

groups = mapping['elixhauser_icd10_quan']
points = weights['elixhauser_icd10_quan']['vw']
codes = {'I110': 'heart failure with hypertension', 'K703': 'alcoholic cirrhosis', 'I426': 'alcoholic cardiomyopathy',
         'I50': 'heart failure', 'K746': 'other cirrhosis'}
people = pd.DataFrame({'id': list(codes), 'code': list(codes)})
found = comorbidity(people, score='elixhauser', weighting='vw', age=None).set_index('id')
for code, name in codes.items():
    right = [group for group, beginnings in groups.items() if code.startswith(tuple(beginnings))]
    counted = [group for group in groups if found.loc[code, group]]
    print(f"{code}, {name}: groups {counted}, score {found.loc[code, 'comorbidity_score']:.0f}; by its lists {right}, "
          f'score {max(0, sum(points[group] for group in right))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pypreg counts preeclampsia on top of an older high blood pressure for one of the two: the code 642.7, which belongs to both
# lists of the Bateman index, has a score of 2 in place of 3.
#
# Packages: pypreg 0.1.0, pandas 2.2.3, numpy 1.26.4.
# Behaviour: each code is replaced by the pattern that it matches, and the patterns are tried one after the other. After
#   the first match the text is a pattern and no code any more, so that a second list never gets it. Mild preeclampsia,
#   with 642.4 and 642.7, comes before preexisting hypertension, with 642.0 to 642.2 and 642.7.
# Expected: both, as the lists of the package itself say: 2 for preeclampsia and 1 for the older hypertension.
# Why it matters here: women with both are the ones whose risk the index should show.
# Instead: add a row with the code 642.0 for each row with 642.7.
# Source: Bateman and others, Development of a comorbidity index for use in obstetric patients, Obstetrics and Gynecology
#   122 (2013), and MILD_PE and HYPERTENSION in bateman_mapping.py, which have 642.7 both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pypreg==0.1.0'
cat > expected.txt <<'EXPECTED'
lists of the package with 642.7: ['mild preeclampsia', 'preexisting hypertension']
preeclampsia alone, ['642.41']: pypreg 2, by its lists 2
older hypertension alone, ['642.01']: pypreg 1, by its lists 1
both, as two codes, ['642.41', '642.01']: pypreg 3, by its lists 3
both, as one code, ['642.71']: pypreg 2, by its lists 3
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pypreg.obstetric_comorbidity import bateman_mapping
from pypreg.obstetric_comorbidity.obstetric_index import calc_index

def score(codes):
    table = pd.DataFrame({'patient': 1, 'pregnancy': 1, 'version': 'ICD9', 'code': codes})
    return int(calc_index(table, 'patient', 'pregnancy', 'code', 'version', 'bateman').bateman_score.iloc[0])

lists = bateman_mapping.BATEMAN_MAP
print('lists of the package with 642.7:', sorted(lists.indicator[lists.code.str.fullmatch(r'642\[.*7.*', na=False)]))
for text, codes, right in (('preeclampsia alone', ['642.41'], 2), ('older hypertension alone', ['642.01'], 1),
                           ('both, as two codes', ['642.41', '642.01'], 3), ('both, as one code', ['642.71'], 3)):
    print(f'{text}, {codes}: pypreg {score(codes)}, by its lists {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# hei-calculator gives a diet of sugar and salt a better Healthy Eating Index than one of fruit and
# vegetables, and an index far above 100.
#
# Packages: hei-calculator 0.1.5, pandas 2.2.3, numpy 2.2.6.
# Behaviour: the components are amounts per 1000 kcal, without the limits and maximum points of HEI-2015,
#   and their sum is the index. Added sugar, sodium, refined grains and saturated fat, of which less is
#   better, are added as they are. Its description says that its calculations follow the HEI-2015
#   scoring standards and that the index lies between 0 and 100.
# Expected: the maximum of 10 points for little added sugar, and 0 for much.
# Why it matters here: an outcome with the wrong sign gives a model with the wrong sign, private or not.
# Instead: the standards of HEI-2015, component by component.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'hei-calculator==0.1.5'
cat > expected.txt <<'EXPECTED'
fruit, vegetables and fish: added sugar 5.0 points, sodium 1.5, index 27.6
sugar, white bread, fat and salt: added sugar 150.0 points, sodium 6.0, index 191.0
more sugar: added sugar 200.0 points, sodium 6.0, index 241.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import pandas as pd
from hei_calculator import process_csv

good = dict(kcal=2000, F_TOTAL=4, G_WHOLE=5, V_TOTAL=5, V_LEGUMES=1, V_DRKGR=1, D_TOTAL=3, PF_TOTAL=6,
            PF_SEAFD_HI=1, PF_SEAFD_LOW=1, PF_SOY=1, PF_NUTSDS=1, PF_LEGUMES=1, G_REFINED=1,
            ADD_SUGARS=10, SOLID_FATS=8, Sodium=1500)
bad = dict.fromkeys(good, 0) | dict(kcal=2000, G_REFINED=10, ADD_SUGARS=300, SOLID_FATS=60, Sodium=6000)
pd.DataFrame([good, bad, bad | dict(ADD_SUGARS=400)]).to_csv('diets.csv', index=False)
with contextlib.redirect_stdout(io.StringIO()):
    process_csv('diets.csv', 'scores.csv')
scores = pd.read_csv('scores.csv')
for row, name in enumerate(('fruit, vegetables and fish', 'sugar, white bread, fat and salt', 'more sugar')):
    seen = scores.iloc[row]
    print(f'{name}: added sugar {seen.HEI_added_sugar:.1f} points, sodium {seen.HEI_sodium:.1f},',
          f'index {seen.HEI_total:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# dii-calculator ignores "Vitamin B12" and "Vitamin B6", since its table has them with a small v and all
# other vitamins with a capital one: a score of -0.71 becomes -0.34, and its reader documents no difference.
#
# Packages: dii-calculator 1.0.13, numpy 1.26.4, pandas 2.2.3, scipy 1.10.1, matplotlib 3.9.4.
# Behaviour: load_nutrient_data documents that the names of columns are case-insensitive. They are compared as
#   they are. The names that are not found are the last ones of a sorted list, of which only the first five
#   are printed, so that "vitamin B12" and "vitamin B6" are never named. A person without a single known
#   value has the score 0, the one of the average diet.
# Expected: the same score for both spellings, and none where nothing is known.
# Instead: rename the columns by get_available_nutrients(), and drop people without values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.10.1' 'matplotlib==3.9.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'dii-calculator==1.0.13'
cat > expected.txt <<'EXPECTED'
['Vitamin C', 'Vitamin D', 'vitamin B6', 'vitamin B12', 'Iron'] score -0.71, by hand -0.71
['Vitamin C', 'Vitamin D', 'Vitamin B6', 'Vitamin B12', 'Iron'] score -0.34, by hand -0.71
nothing known, and two vitamins known: [0.0, -0.34]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import math

import pandas
from dii.calculator import calculate_dii
from dii.reader import load_nutrient_data

day = {'Vitamin C': 150, 'Vitamin D': 7, 'B6': 2.5, 'B12': 3.0, 'Iron': 14}
table = {'Vitamin C': (-0.424, 118.2, 43.46), 'Vitamin D': (-0.446, 6.26, 2.21), 'B6': (-0.365, 1.47, 0.74),
         'B12': (0.106, 5.15, 2.7), 'Iron': (0.032, 13.35, 3.71)}
right = sum(weight * math.erf((day[name] - mean) / sd / 2 ** 0.5) for name, (weight, mean, sd) in table.items())
for spelling in ('vitamin ', 'Vitamin '):
    pandas.DataFrame([{spelling + name if name[0] == 'B' else name: value for name, value in day.items()}]).to_csv('day.csv', index=False)
    data = load_nutrient_data('day.csv')
    with contextlib.redirect_stdout(io.StringIO()):
        score = calculate_dii(data)['DII_score'][0]
    print(list(data.columns), f'score {score:.2f}, by hand {right:.2f}')
unknown = pandas.DataFrame({'Vitamin C': [None, 150.0], 'Vitamin D': [None, 7.0]}, dtype=float)
with contextlib.redirect_stdout(io.StringIO()):
    scores = calculate_dii(unknown)['DII_score']
print('nothing known, and two vitamins known:', [round(float(score), 2) for score in scores])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

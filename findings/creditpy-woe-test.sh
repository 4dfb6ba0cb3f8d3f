#!/usr/bin/env bash
# creditpy's weights of evidence of the test table are shifted by one class.
#
# Packages: creditpy 2.7, gap-stat 2.0.3, pandas 2.2.3, numpy 1.26.4.
# Behaviour: woe_binning labels the classes of the test table with their left ends, and looks these
#   numbers up among the intervals of the training table. The intervals do not contain their left
#   ends, so each finds the class below; the first one finds itself.
# Expected: the weight of the class that a value is in, as in the training table.
# Why it matters here: a scorecard is judged on the test table, where its features belong to other
#   people; the loss looks like the cost of noise or of overfitting.
# Instead: pandas.cut of both tables with the same bins, and a map from the codes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'scikit-learn==1.5.2' 'matplotlib==3.11.2' 'setuptools==84.2.1' 'wheel==0.48.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps --no-build-isolation 'gap-stat==2.0.3' 'creditpy==2.7'
cat > expected.txt <<'EXPECTED'
69 to 79 years: weight -0.28 in training, in the test 1.18
56 to 68 years: weight 1.18 in training, in the test -0.84
44 to 55 years: weight -0.84 in training, in the test 0.89
32 to 43 years: weight 0.89 in training, in the test -1.75
20 to 31 years: weight -1.75 in training, in the test -1.75
AUC of the weights of the train table: 0.76
AUC of the weights of the test table: 0.47
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from creditpy import woe_binning
from sklearn.metrics import roc_auc_score

random = np.random.default_rng(0)
age = random.integers(20, 80, 6000)
default = random.random(6000) < np.select([age < 32, age < 44, age < 56, age < 68], [0.1, 0.6, 0.2, 0.7], 0.3)
people = pd.DataFrame({'age': age, 'default': default.astype(int)})
train, test = woe_binning(people.copy(), people.copy(), 'default', bins=5)  # the same people in both
seen = pd.DataFrame({'age': age, 'train': train['age_bin'].astype(float), 'test': test['age_bin'].astype(float)})
for low, rows in seen.groupby('train', sort=False):
    classes = rows.groupby('test').size()
    print(f"{rows['age'].min()} to {rows['age'].max()} years: weight {low:.2f} in training, in the test "
          + ', '.join(f'{value:.2f}' for value in classes.index))
for table in ('train', 'test'):
    print(f'AUC of the weights of the {table} table: {roc_auc_score(default, seen[table]):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

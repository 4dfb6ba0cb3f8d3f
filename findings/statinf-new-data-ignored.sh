#!/usr/bin/env bash
# The logistic regression of statinf with an intercept predicts the people that it was fitted to whatever people it is
# given: the first new person has the risk of the first old one.
#
# Packages: statinf 1.3.0, pycof 1.5.15, jax 0.6.1, jaxlib 0.6.1, numpy 1.26.4, pandas 2.2.3, scipy 1.11.4,
#   matplotlib 3.11.2.
# Behaviour: GLM.predict reads the columns of the new table and then, where there is an intercept, joins the column of
#   ones to the old table. Without an intercept the new table is used.
# Expected: the risk of each new person.
# Why it matters here: a test set that is the first part of the training set looks perfect, any other like chance.
# Instead: compute the risk from the coefficients, as below.
# Source: the documentation of statinf: new_data, "Input data to be used for the prediction".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statinf==1.3.0' 'pycof==1.5.15' 'jax==0.6.1' 'jaxlib==0.6.1' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.11.4' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
intercept True: 1.3% of the young are ill, mean risk by statinf 49.4%, by its coefficients 1.9%; equal to the risks of the old: True
intercept False: 1.3% of the young are ill, mean risk by statinf 1.8%, by its coefficients 1.8%; equal to the risks of the old: False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from statinf.regressions import GLM

random = np.random.default_rng(0)


def draw(people, mean):
    age = random.normal(mean, 10, people)
    return pd.DataFrame({'age': age, 'ill': (random.random(people) < 1 / (1 + np.exp(-(age - 60) / 5))).astype(int)})


old, young = draw(1000, 60), draw(1000, 30)
for intercept in (True, False):
    table, other = (old, young) if intercept else (old - [60, 0], young - [60, 0])
    model = GLM('ill ~ age', table, fit_intercept=intercept)
    model.fit()
    first, slope = (model.beta[0, 0], model.beta[1, 0]) if intercept else (0.0, model.beta[0, 0])
    right = 1 / (1 + np.exp(-(first + slope * other['age'])))
    found = model.predict(other, return_proba=True)
    print(f"intercept {intercept}: {other['ill'].mean():.1%} of the young are ill, mean risk by statinf "
          f'{found.mean():.1%}, by its coefficients {right.mean():.1%}; equal to the risks of the old: '
          f'{bool((found == model.predict(table, return_proba=True)).all())}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The 95 % intervals of predictions in statinf contain 2 % of the new values where 500 people are known: they are the
# sum of the standard errors of all coefficients, divided by the root of the number of people.
#
# Packages: statinf 1.3.0, pycof 1.5.15, jax 0.6.1, jaxlib 0.6.1, numpy 1.26.4, pandas 2.2.3, scipy 1.11.4,
#   matplotlib 3.11.2.
# Behaviour: the interval has the same width for everybody and does not know the spread around the line. It falls with
#   1/n where a prediction interval stays, and adding a variable in other units changes it.
# Expected: about 95 % of the new values; of the means 95 % for a confidence interval.
# Why it matters here: a value outside of its interval is called abnormal.
# Instead: the interval by hand, as below, or get_prediction of statsmodels.
# Source: Draper and Smith (1998), "Applied regression analysis", chapter 3: s² (1 + x' (X'X)⁻¹ x).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statinf==1.3.0' 'pycof==1.5.15' 'jax==0.6.1' 'jaxlib==0.6.1' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.11.4' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
50 people: statinf has 29% of the new values and 100% of the true means in its intervals, by hand 96% of the new values
500 people: statinf has 2% of the new values and 80% of the true means in its intervals, by hand 95% of the new values
5000 people: statinf has 0% of the new values and 9% of the true means in its intervals, by hand 95% of the new values
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from scipy.stats import t
from statinf.regressions import OLS

random = np.random.default_rng(0)


def draw(people):
    table = pd.DataFrame({'age': random.normal(50, 10, people), 'weight': random.normal(70, 10, people)})
    return table.assign(pressure=80 + table['age'] + 0.2 * table['weight'] + random.normal(0, 10, people))


def inside(low, values, high):
    return ((low <= values) & (values <= high)).mean()


for people in (50, 500, 5000):
    table, new = draw(people), draw(5000)
    model = OLS('pressure ~ age + weight', table, fit_intercept=True)
    found = model.predict(new, conf_level=0.95)
    x = np.column_stack([np.ones(people), table[['age', 'weight']]])
    z = np.column_stack([np.ones(5000), new[['age', 'weight']]])
    spread = np.sqrt(model.rss() / (people - 3) * (1 + ((z @ np.linalg.inv(x.T @ x)) * z).sum(axis=1)))
    half = t.ppf(0.975, people - 3) * spread
    mean = 80 + new['age'] + 0.2 * new['weight']
    low, middle, high = found['LowerBound'], found['Prediction'], found['UpperBound']
    print(f"{people} people: statinf has {inside(low, new['pressure'], high):.0%} of the new values and "
          f'{inside(low, mean, high):.0%} of the true means in its intervals, by hand '
          f"{inside(middle - half, new['pressure'], middle + half):.0%} of the new values")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

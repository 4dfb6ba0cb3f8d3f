#!/usr/bin/env bash
# lapras's variance inflation factor does not see collinear columns.
#
# Packages: lapras 0.0.23, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2, statsmodels
#   0.14.5, matplotlib 3.10.6, seaborn 0.13.2, plotly 7.1.0.
# Behaviour: VIF regresses each column on the others through the origin, and divides the variance of
#   the column around its mean by what is left. The factor is 1 / (1 - R²) with an intercept, at
#   least 1. Without one, columns that do not pass through the origin are explained badly: unrelated
#   ones have factors below 1, and a column that is a constant minus another one, which a model with
#   an intercept cannot tell from it, has the smallest. Missing values count as -99, so that two
#   columns that are missing for the same people inflate each other.
# Expected: about 1 for unrelated columns, and 10,000 for nearly collinear ones.
# Instead: statsmodels' variance_inflation_factor of a table with a column of ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2' 'statsmodels==0.14.5' 'matplotlib==3.10.6' 'seaborn==0.13.2' 'plotly==7.1.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'lapras==0.0.23'
cat > expected.txt <<'EXPECTED'
unrelated: [0.72, 0.31], with an intercept 1.00 for both
one is 100 minus the other: [0.26, 0.26], with an intercept 9698.23 for both
missing for the same people: [963.92, 963.94], with an intercept 1.00 for both
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from lapras.stats import VIF
from statsmodels.stats.outliers_influence import variance_inflation_factor

draw = np.random.RandomState(0)
share = 50 + 10 * draw.normal(size=1000)
absent = draw.uniform(size=1000) < 0.2
tables = {'unrelated': {'age': 50 + 10 * draw.normal(size=1000), 'pressure': 120 + 15 * draw.normal(size=1000)},
          'one is 100 minus the other': {'own': share, 'others': 100 - share + 0.1 * draw.normal(size=1000)},
          'missing for the same people': {'x': np.where(absent, np.nan, draw.normal(size=1000)),
                                          'y': np.where(absent, np.nan, draw.normal(size=1000))}}
for name, columns in tables.items():
    table = pd.DataFrame(columns)
    complete = np.column_stack([np.ones(len(table.dropna())), table.dropna()])
    right = variance_inflation_factor(complete, 1)
    print(f'{name}: {VIF(table).round(2).tolist()}, with an intercept {right:.2f} for both')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

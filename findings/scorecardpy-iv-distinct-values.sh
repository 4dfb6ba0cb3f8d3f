#!/usr/bin/env bash
# scorecardpy drops the best variables of a scorecard, since it takes each distinct amount for a category.
#
# Packages: scorecardpy 0.1.9.7, pandas 2.3.3, numpy 2.4.6, scikit-learn 1.9.1.
# Behaviour: iv computes the information value of a column by its distinct values, and replaces a count of
#   0 by 0.9. A column of amounts has one client for each value, so that its information value depends
#   on the default rate alone: income that decides about defaults has the same one as random numbers.
#   It lies below 0.02, the default limit of var_filter, which removes the column.
# Expected: bins first, or a message that a column is not categorical.
# Instead: iv of the bins of woebin, or var_filter(..., var_kp=[...]) for columns of amounts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scorecardpy==0.1.9.7' 'pandas==2.3.3' 'numpy==2.4.6' 'scikit-learn==1.9.1'
cat > expected.txt <<'EXPECTED'
income: information value 0.007, kept by var_filter False
noise: information value 0.007, kept by var_filter False
tenths: information value 1.619, kept by var_filter True
defaults: 66% in the lowest tenth of incomes, 1% in the highest
information value of the tenths, counted: 1.619
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from scorecardpy import iv, var_filter

random = np.random.default_rng(0)
income = random.lognormal(10, 0.5, 2000).round(2)
risk = 1 / (1 + np.exp(2 + 3 * (np.log(income) - 10)))
table = pd.DataFrame({
    'default': (random.random(2000) < risk).astype(int),
    'income': income,
    'noise': random.normal(size=2000),
    'tenths': pd.qcut(income, 10, labels=False),
})
with contextlib.redirect_stdout(io.StringIO()):
    values = iv(table, 'default').set_index('variable')['info_value']
    kept = var_filter(table, 'default').columns
for name in ('income', 'noise', 'tenths'):
    print(f'{name}: information value {values[name]:.3f}, kept by var_filter {name in kept}')
rates = table.groupby('tenths')['default'].mean()
print(f'defaults: {rates.iloc[0]:.0%} in the lowest tenth of incomes, {rates.iloc[-1]:.0%} in the highest')
counts = pd.crosstab(table['tenths'], table['default']).replace(0, 0.9)
shares = counts / counts.sum()
own = ((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum()
print(f'information value of the tenths, counted: {own:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

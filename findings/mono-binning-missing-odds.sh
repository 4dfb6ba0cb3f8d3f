#!/usr/bin/env bash
# mono-binning gives missing values another quantity than all others.
#
# Packages: mono-binning 0.1.6, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: the weight of evidence of a class is the logarithm of its share of the defaults over
#   its share of the others, 0 for a class like everybody. mono_bin computes it so for the classes,
#   and for missing values the logarithm of defaults over others among them, without the totals. It
#   is off by the log odds of the whole table. calculate_iv puts both into one column, so with 5 %
#   of defaults a missing income counts like the best of customers, whoever has it. The missing
#   values are not in the information value either.
# Expected: a weight near 0 where values are missing by chance.
# Instead: subtract the log odds of the table from the weight of missing values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'mono-binning==0.1.6'
cat > expected.txt <<'EXPECTED'
5 % default, 5 % of those with a missing income: weight -2.88, by its definition 0.07; others from -0.12 to 0.14
20 % default, 20 % of those with a missing income: weight -1.37, by its definition 0.00; others from -0.11 to 0.08
50 % default, 50 % of those with a missing income: weight 0.01, by its definition 0.01; others from -0.15 to 0.07
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from mono_binning import calculate_iv

for rate in (0.05, 0.2, 0.5):
    draw = np.random.RandomState(0)
    income = draw.normal(size=20000)
    default = (draw.uniform(size=20000) < rate).astype(int)
    income[draw.uniform(size=20000) < 0.2] = np.nan  # by chance
    table = pd.DataFrame({'income': income, 'default': default})
    weights = calculate_iv(table, 'default')[1]['income_WOE']
    missing = table['income'].isna()
    share = [default[missing & (default == k)].size / (default == k).sum() for k in (1, 0)]
    print(f'{100 * rate:.0f} % default, {100 * default[missing].mean():.0f} % of those with a missing income:',
          f'weight {weights[missing].mean():.2f}, by its definition {np.log(share[0] / share[1]):.2f};',
          f'others from {weights[~missing].min():.2f} to {weights[~missing].max():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# optbinning learns a weight of evidence for missing values and does not use it in transform.
#
# Packages: optbinning 1.0.0, scikit-learn 1.9.1, pandas 3.1.1, numpy 2.4.6.
# Behaviour: the binning table has a row Missing with a rate of default and a weight of evidence,
#   and counts it in the information value. transform gives 0 all the same: the weight of an average
#   client, and an event rate of 0, that of one who never defaults.
# Expected: the values of the table; in a score card, missing income is rarely neutral.
# Instead: transform(..., metric_missing='empirical'), and metric_special in the same way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'optbinning==1.0.0' 'scikit-learn==1.9.1' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
table: missing, rate of default 0.57, weight of evidence -1.76
transform, woe: 0.00; with metric_missing="empirical": -1.76
transform, event_rate: 0.00; with metric_missing="empirical": 0.57
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from optbinning import OptimalBinning

random = np.random.default_rng(0)
income = random.normal(3000, 800, size=4000)
default = random.random(4000) < np.where(income < 2500, 0.2, 0.05)
missing = random.random(4000) < 0.2
income[missing] = np.nan
default[missing] = random.random(missing.sum()) < 0.6
binning = OptimalBinning(name='income').fit(income, default.astype(int))
table = binning.binning_table.build()
row = table[table['Bin'] == 'Missing'].iloc[0]
rate, weight = row['Event rate'], row['WoE']
print(f'table: missing, rate of default {rate:.2f}, weight of evidence {weight:.2f}')
for metric in ('woe', 'event_rate'):
    value = binning.transform([np.nan], metric=metric)[0]
    learned = binning.transform([np.nan], metric=metric, metric_missing='empirical')[0]
    print(f'transform, {metric}: {value:.2f}; with metric_missing="empirical": {learned:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

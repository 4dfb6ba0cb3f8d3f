#!/usr/bin/env bash
# The time-dependent ROC curve of cenroc uses no times: it takes people who were censored for
# people who live.
#
# Packages: cenroc 0.0.7, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2, statsmodels
#   0.15.0.
# Behaviour: cenROC takes the times Y, the indicator of events and the time t of the prediction.
#   Its computation has the marker and the indicator only: everybody with an event is a case and
#   everybody who was censored a control, at any time. The area is the same for any time, here
#   0.76 where the areas are 0.78 to 0.87, and depends on when follow-up ends.
# Expected: cumulative sensitivity and dynamic specificity at t, weighted for censoring, as its
#   documentation and the R package of the same name have it.
# Instead: sksurv.metrics.cumulative_dynamic_auc.
# Source: Beyene and El Ghouch, Smoothed time-dependent receiver operating characteristic curve
#   for right censored survival data, Statistics in Medicine 2020.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2' 'statsmodels==0.15.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cenroc==0.0.7'
cat > expected.txt <<'EXPECTED'
time 0.1: cenroc 0.76, of all lives without censoring 0.78
time 1.0: cenroc 0.76, of all lives without censoring 0.81
time 3.0: cenroc 0.76, of all lives without censoring 0.87
with the same time for everybody: 0.76; events against censored people 0.76
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from cenroc import cenROC

random = np.random.default_rng(0)
marker = random.normal(size=4000)
life = random.exponential(np.exp(-marker))
end = random.uniform(0, 4, 4000)
time, event = np.minimum(life, end), (life <= end).astype(int)

def area(case, control):
    ranks = np.searchsorted(np.sort(control), case)
    return ranks.mean() / len(control)

for t in (0.1, 1.0, 3.0):
    seen = cenROC(pd.Series(time), pd.Series(marker), pd.Series(event), t).AUC()
    print(f'time {t}: cenroc {seen:.2f}, of all lives without censoring {area(marker[life <= t], marker[life > t]):.2f}')
same = cenROC(pd.Series(np.ones(4000)), pd.Series(marker), pd.Series(event), 1.0).AUC()
print(f'with the same time for everybody: {same:.2f}; events against censored people {area(marker[event == 1], marker[event == 0]):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Kolmogorov-Smirnov check of etsi-watchdog detects drift in 80 % of the comparisons of two samples of one population,
# and its population stability index is 0, no drift, where all values have moved.
#
# Packages: etsi-watchdog 3.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2, scikit-learn 1.9.1,
#   seaborn 0.13.2, slack-sdk 3.48.0, Jinja2 3.1.6.
# Behaviour: DriftCheck compares a score with a threshold of 0.2. For "ks" the score is 1 - p-value, which is above 0.2 in
#   80 % of the comparisons without drift, however many rows there are. For "psi", the default, bins that are empty in one
#   of the samples add 0, so that the index falls to 0 where the samples have no bin in common.
# Expected: the statistic of the test, or a p-value below 0.05, and an index that grows with the distance.
# Why it matters here: a monitor that is always red is switched off, and one that is green means nothing.
# Instead: threshold=0.95 for "ks", and no empty bins for "psi".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2' 'scikit-learn==1.9.1' 'seaborn==0.13.2' 'slack-sdk==3.48.0' 'Jinja2==3.1.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'etsi-watchdog==3.0.0'
cat > expected.txt <<'EXPECTED'
ks, 100 rows without drift: drift in 139 of 200 comparisons, p < 0.05 in 5
ks, 1000 rows without drift: drift in 159 of 200 comparisons, p < 0.05 in 8
ks, 10000 rows without drift: drift in 154 of 200 comparisons, p < 0.05 in 8
psi, everybody 0 years older: 0.00, drift False
psi, everybody 10 years older: 0.97, drift True
psi, everybody 20 years older: 3.45, drift True
psi, everybody 60 years older: 0.41, drift True
psi, everybody 90 years older: 0.00, drift False
psi, everybody 200 years older: 0.00, drift False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import numpy as np
import pandas as pd
from etsi.watchdog import DriftCheck

random = np.random.default_rng(0)
for rows in (100, 1000, 10_000):
    drifted = below = 0
    for repeat in range(200):
        reference, current = (pd.DataFrame({'age': random.normal(50, 10, rows)}) for sample in range(2))
        result = DriftCheck(reference, algorithm='ks').run(current, ['age'])['age']
        drifted += result.is_drifted
        below += result.details['p_value'] < 0.05
    print(f'ks, {rows} rows without drift: drift in {drifted} of 200 comparisons, p < 0.05 in {below}')
reference = pd.DataFrame({'age': random.normal(50, 10, 5000)})
for shift in (0, 10, 20, 60, 90, 200):
    current = pd.DataFrame({'age': random.normal(50 + shift, 10, 5000)})
    result = DriftCheck(reference).run(current, ['age'])['age']
    print(f'psi, everybody {shift} years older: {result.score:.2f}, drift {bool(result.is_drifted)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

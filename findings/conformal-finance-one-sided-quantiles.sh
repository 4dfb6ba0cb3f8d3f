#!/usr/bin/env bash
# The rolling intervals of conformal-finance, and its asymmetric ones, leave out alpha at each end:
# with alpha=0.1, documented as the miscoverage, 80 % of the values are inside.
#
# Packages: conformal-finance 0.1.1, pandas 3.1.1, numpy 2.4.6, scikit-learn 1.9.1.
# Behaviour: RollingConformalPredictor and SplitConformalPredictor(symmetric=False) take the
#   quantile alpha of the residuals for the lower end and the one of 1 - alpha for the upper, so
#   that 2 alpha of the values are outside. The symmetric one, which takes absolute values, is
#   right.
# Expected: the quantiles alpha / 2 and 1 - alpha / 2, for 90 % inside with alpha=0.1 ("default
#   0.1, i.e. target 90% coverage").
# Why it matters here: an interval that promises 90 % misses twice as many values.
# Instead: alpha=0.05 for 90 %, or SplitConformalPredictor as it is.
# Source: Romano, Patterson and Candes, Conformalized Quantile Regression, NeurIPS 2019, with half
#   of alpha at each end.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'numpy==2.4.6' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'conformal-finance==0.1.1'
cat > expected.txt <<'EXPECTED'
alpha=0.05: inside with rolling 90%, asymmetric 90%, symmetric 95%; with half of alpha at each end 95%
alpha=0.1: inside with rolling 80%, asymmetric 80%, symmetric 90%; with half of alpha at each end 90%
alpha=0.2: inside with rolling 60%, asymmetric 60%, symmetric 80%; with half of alpha at each end 80%
alpha=0.4: inside with rolling 21%, asymmetric 21%, symmetric 60%; with half of alpha at each end 60%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from conformal_finance.conformal.rolling import RollingConformalPredictor
from conformal_finance.conformal.split import SplitConformalPredictor

random = np.random.default_rng(0)
values, forecasts = random.normal(size=52000), np.zeros(52000)
past, future = slice(0, 2000), slice(2000, None)


def share(intervals):
    inside = (values[future] >= intervals['lower'].to_numpy()) & (values[future] <= intervals['upper'].to_numpy())
    return f'{inside.mean():.0%}'


for alpha in (0.05, 0.1, 0.2, 0.4):
    rolling = RollingConformalPredictor(alpha=alpha, window=2000).partial_fit(values[past], forecasts[past])
    split, two = (SplitConformalPredictor(alpha=alpha, symmetric=kind).fit(values[past], forecasts[past]) for kind in (True, False))
    low, high = np.quantile(values[past], [alpha / 2, 1 - alpha / 2])
    by_hand = np.mean((values[future] >= low) & (values[future] <= high))
    print(f'alpha={alpha}: inside with rolling {share(rolling.predict(forecasts[future]))}, '
          f'asymmetric {share(two.predict(forecasts[future]))}, symmetric {share(split.predict(forecasts[future]))}; '
          f'with half of alpha at each end {by_hand:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

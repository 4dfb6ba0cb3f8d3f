#!/usr/bin/env bash
# The 90 % confidence interval of uncertainty-calibration is one of 99.9 %: alpha is a share in one
# function and per cent in the next.
#
# Packages: uncertainty-calibration 0.1.4, scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: get_calibration_error_uncertainties documents 1 - alpha intervals, with alpha=0.1 by
#   default, and hands alpha to a bootstrap that takes per cent: it cuts 0.05 % of the resamples at
#   each end, in place of 5 %. With its 100 resamples the interval is from the smallest to the
#   largest. alpha=0.05 and alpha=0.1 hardly differ; alpha=10 gives 90 %.
# Expected: the 5th and 95th percentile of the resamples for alpha=0.1.
# Why it matters here: two models whose calibration differs clearly seem equal.
# Instead: alpha=10, and 1000 resamples of your own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'uncertainty-calibration==0.1.4' 'scikit-learn==1.9.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
alpha=0.1: 0.048 to 0.156
alpha=10.0: 0.078 to 0.132
the same resamples, 99.9%: 0.048 to 0.156
the same resamples, 90.0%: 0.078 to 0.132
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from calibration import get_calibration_error, get_calibration_error_uncertainties

random = np.random.default_rng(0)
predicted = random.uniform(size=500)
outcome = (random.uniform(size=500) < predicted ** 1.5).astype(int)
for alpha in (0.1, 10.0):
    np.random.seed(0)
    low, middle, high = get_calibration_error_uncertainties(predicted, outcome, p=1, alpha=alpha)
    print(f'alpha={alpha}: {low:.3f} to {high:.3f}')
np.random.seed(0)
resamples = []
for _ in range(100):
    rows = np.random.choice(list(range(500)), size=500, replace=True)
    resamples.append(get_calibration_error(predicted[rows], outcome[rows], p=1, debias=False))
twice = 2 * get_calibration_error(predicted, outcome, p=1, debias=False)
for share in (0.999, 0.9):
    low, high = (twice - np.percentile(resamples, 50 + sign * 50 * share) for sign in (1, -1))
    print(f'the same resamples, {share:.1%}: {low:.3f} to {high:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# andrew_confidence_intervals ignores the variance of the second group.
#
# Packages: andrew_confidence_intervals 0.0.6, numpy 2.2.6, scipy 1.15.3.
# Behaviour: ci_mean_dif for variances that are unknown and unequal adds sample_var_x / n_x and
#   sample_var_x / n_y, so the spread of y is not in the interval. If the first group is the steady
#   one, the interval is too narrow, and if it is the other way round too wide. For a known common
#   variance it takes the variance for the standard deviation, and n_x + n_y for the number of
#   people. ci_vars_ratio returns the upper end first.
# Expected: the interval of Welch, 95 % in both orders.
# Instead: scipy.stats.ttest_ind(x, y, equal_var=False).confidence_interval().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'setuptools==80.9.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps --no-build-isolation 'andrew_confidence_intervals==0.0.6'
cat > expected.txt <<'EXPECTED'
steady minus variable: 95 % intervals that hold the true difference 48 %, by Welch 95 %
variable minus steady: 95 % intervals that hold the true difference 99 %, by Welch 96 %
known variance of 9, difference 3: 1.24 to 4.76, by hand 1.82 to 4.18
ratio of variances of 20 values each: 70.62 to 11.06
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from andrew_confidence_intervals import ci_mean_dif, ci_vars_ratio
from scipy.stats import ttest_ind

draw = np.random.RandomState(0)
spread = {'steady': 1.0, 'variable': 4.0}
for first, second in (('steady', 'variable'), ('variable', 'steady')):
    inside, right = 0, 0
    for _ in range(2000):
        x, y = (draw.normal(scale=spread[name], size=20) for name in (first, second))
        with contextlib.redirect_stdout(io.StringIO()):
            low, high = ci_mean_dif(0.05, sample_x=x, sample_y=y)
        inside += low < 0 < high
        welch = ttest_ind(x, y, equal_var=False).confidence_interval(0.95)
        right += welch.low < 0 < welch.high
    print(f'{first} minus {second}: 95 % intervals that hold the true difference {inside / 20:.0f} %,',
          f'by Welch {right / 20:.0f} %')
with contextlib.redirect_stdout(io.StringIO()):
    low, high = ci_mean_dif(0.05, sample_mean_x=10.0, sample_mean_y=7.0, n_x=50, n_y=50, true_var_both=9.0)
half = 1.96 * np.sqrt(9 / 50 + 9 / 50)
print(f'known variance of 9, difference 3: {low:.2f} to {high:.2f}, by hand {3 - half:.2f} to {3 + half:.2f}')
print('ratio of variances of 20 values each: {:.2f} to {:.2f}'.format(*ci_vars_ratio(0.05, sample_x=x, sample_y=y)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The sample size that power-analysis gives for a two-sample t-test is the one of a test of one
# sample: half of the people that each group needs.
#
# Packages: power-analysis 0.1.1, numpy 2.4.6, scipy 1.17.1.
# Behaviour: TTestSampleSize squares the sum of the quantiles times the standard deviation over
#   the difference, which is the variance of one mean. The difference of two means has twice the
#   variance. It also cuts the decimals off where sample sizes are rounded up. The study that it
#   plans with a power of 80 % has 45 to 51 %.
# Expected: twice that number in each group, as its documentation says that it is for a two-sample
#   t-test.
# Instead: statsmodels.stats.power.TTestIndPower().solve_power.
# Source: Cohen, Statistical Power Analysis for the Behavioral Sciences, chapter 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'power-analysis==0.1.1'
cat > expected.txt <<'EXPECTED'
difference of 0.2 deviations: 196 people, power 51% with as many in each group; needed 394, power 80%
difference of 0.5 deviations: 31 people, power 49% with as many in each group; needed 64, power 80%
difference of 0.75 deviations: 13 people, power 45% with as many in each group; needed 29, power 80%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import ceil

import numpy as np
from power_analysis.modules import TTestSampleSize
from scipy import stats

def power(n, effect):
    df, shift = 2 * n - 2, effect * np.sqrt(n / 2)
    limit = stats.t.ppf(0.975, df)
    return stats.nct.sf(limit, df, shift) + stats.nct.cdf(-limit, df, shift)

for effect in (0.2, 0.5, 0.75):
    seen = TTestSampleSize(effect, 1.0, 0.05, 0.8).calculate_sample_size()
    needed = next(n for n in range(3, 2000) if power(n, effect) >= 0.8)
    print(f'difference of {effect} deviations: {seen} people, power {power(seen, effect):.0%} with as many in each group;',
          f'needed {needed}, power {power(needed, effect):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

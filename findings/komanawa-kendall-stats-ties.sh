#!/usr/bin/env bash
# The Mann-Kendall test of komanawa-kendall-stats adds the correction for equal values to the variance,
# times the number of groups of them, where it should subtract it once.
#
# Packages: komanawa-kendall-stats 2.0.3, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, matplotlib 3.9.4.
# Behaviour: equal values, as in concentrations of one decimal, make the variance of the statistic
#   smaller. MannKendall adds the sum of t(t - 1)(2t + 5), multiplied by the number of groups that are
#   tied, so that it is larger: a trend in 100 values has a p-value of 0.007, and of 0.06 once they are
#   rounded to whole numbers, where 0.005 is right. Of 100 rising series of whole numbers 51 are found
#   in place of 83. Its own older function, which it keeps as deprecated, adds the sum as well.
#   The seasonal test has the same lines.
# Expected: nearly the same p-value for values that are rounded.
# Instead: pymannkendall, or the variance as it is computed here.
# Source: Kendall, Rank Correlation Methods, 1975; Hirsch, Slack and Smith, Techniques of trend analysis
#   for monthly water quality data, 1982.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'matplotlib==3.9.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'komanawa-kendall-stats==2.0.3'
cat > expected.txt <<'EXPECTED'
nitrate rounded to 6 decimals, 0 groups of equal values: variance 112750, p 0.0074, by hand 112750, 0.0074
nitrate rounded to 1 decimals, 21 groups of equal values: variance 121668, p 0.008, by hand 112325, 0.0058
nitrate rounded to 0 decimals, 3 groups of equal values: variance 192313, p 0.062, by hand 86229, 0.0052
100 rising series of 40 whole numbers: 51 trends found, by hand 83
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from komanawa.kendall_stats import MannKendall
from scipy import stats

random = np.random.default_rng(0)

def by_hand(values):
    n = len(values)
    s = sum(np.sign(values[later] - values[first]) for first in range(n) for later in range(first + 1, n))
    counts = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - np.sum(counts * (counts - 1) * (2 * counts + 5))) / 18
    return variance, 2 * stats.norm.sf(abs(s - np.sign(s)) / np.sqrt(variance))

nitrate = 2 + 0.005 * np.arange(100) + random.normal(0, 0.6, 100)
for decimals in (6, 1, 0):
    values = np.round(nitrate, decimals)
    seen = MannKendall(values)
    variance, p = by_hand(values)
    tied = np.sum(np.unique(values, return_counts=True)[1] > 1)
    print(f'nitrate rounded to {decimals} decimals, {tied} groups of equal values: variance {float(seen.var_s):.0f}, p {float(seen.p):.2g}, by hand {variance:.0f}, {p:.2g}')
found = [0, 0]
for _ in range(100):
    values = np.round(1.2 * np.arange(40) / 40 + random.normal(1, 0.7, 40))
    found[0] += MannKendall(values).p < 0.05
    found[1] += by_hand(values)[1] < 0.05
print(f'100 rising series of 40 whole numbers: {found[0]} trends found, by hand {found[1]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

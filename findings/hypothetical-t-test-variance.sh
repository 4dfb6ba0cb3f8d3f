#!/usr/bin/env bash
# The t-tests of hypothetical divide the squares by n, so that they find differences that are not
# there, and the interval of a mean begins at its upper end.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: tTest documents the sample variance and takes numpy.var without ddof=1, one of n and not
#   n - 1, in formulas that are made for n - 1. Student's t of two groups of three is 1.22 times the
#   right one, and is significant without a difference in 8 % of the comparisons. The interval of one
#   mean is written from mean + 1.96 to mean - 1.96 standard errors, whatever n.
# Expected: 5 %, and an interval of t with n - 1 degrees of freedom, from the lower to the upper end.
# Instead: scipy.stats.ttest_ind and ttest_1samp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
groups of 3 without a difference: significant in 8.2 % (Student) and 5.8 % (Welch), by scipy in 4.2 %
groups of 5 without a difference: significant in 8.8 % (Student) and 7.4 % (Welch), by scipy in 5.5 %
groups of 10 without a difference: significant in 5.3 % (Student) and 5.2 % (Welch), by scipy in 4.5 %
mean of 4 weights: 65.0, interval from 67.9 to 62.1; by scipy from 59.6 to 70.4
1, 2, 3 and 2, 3, 4: t -1.500, by hand -1.225
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hypothetical.hypothesis import tTest
from scipy import stats

random = np.random.default_rng(0)
for people in (3, 5, 10):
    rejected = [0, 0, 0]
    for _ in range(2000):
        one, two = random.normal(size=people), random.normal(size=people)
        rejected[0] += tTest(one, two, var_equal=True).p_value < 0.05
        rejected[1] += tTest(one, two).p_value < 0.05
        rejected[2] += stats.ttest_ind(one, two).pvalue < 0.05
    print(f'groups of {people} without a difference: significant in {rejected[0] / 20:.1f} % (Student)',
          f'and {rejected[1] / 20:.1f} % (Welch), by scipy in {rejected[2] / 20:.1f} %')
weights = [61.0, 64.0, 66.0, 69.0]
test = tTest(weights)
low, high = test.confidence_interval
right = stats.ttest_1samp(weights, 0).confidence_interval()
print(f'mean of {len(weights)} weights: {np.mean(weights):.1f}, interval from {low:.1f} to {high:.1f};',
      f'by scipy from {right.low:.1f} to {right.high:.1f}')
ratio = tTest([1.0, 2, 3], [2.0, 3, 4], var_equal=True).t_statistic
print(f'1, 2, 3 and 2, 3, 4: t {ratio:.3f}, by hand {-1 / np.sqrt(2 / 3):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

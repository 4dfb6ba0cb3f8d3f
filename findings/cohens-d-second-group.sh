#!/usr/bin/env bash
# The effect size of cohens-d depends on which group is named first, since the variance of the second one
# is divided by n - 2: 1.45 and 1.63, for 1.71.
#
# Packages: cohens-d 0.1.5, numpy 2.4.6, scipy 1.17.1.
# Behaviour: cohensd_2ind pools the variances of two groups, the first with one degree of freedom less than
#   it has values and the second with two less. Its sister cohensd_2ind_from_stats, given means and
#   standard deviations, has one less for both. The absolute value is returned, so an exchange should
#   change nothing.
# Expected: |m1 - m2| over the root of the sum of squares within the groups over n1 + n2 - 2.
# Why it matters here: with small groups, for which effect sizes are reported, the error is 5 to 20 %.
# Instead: cohensd_2ind_from_stats.
# Source: Cohen, Statistical Power Analysis for the Behavioral Sciences, section 2.5: |t| sqrt(1/n1 +
#   1/n2).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cohens-d==0.1.5' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
4 and 4 values: from t 1.715, from_stats 1.715, cohensd_2ind 1.449, exchanged 1.635
20 and 3 values: from t 1.371, from_stats 1.371, cohensd_2ind 1.091, exchanged 1.356
200 and 200 values: from t 0.380, from_stats 0.380, cohensd_2ind 0.380, exchanged 0.380
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from cohens_d.cohens_d import cohensd_2ind, cohensd_2ind_from_stats
from scipy.stats import ttest_ind

random = np.random.default_rng(0)
for name, first, second in (('4 and 4', np.array([1.0, 2, 3, 4]), np.array([3.0, 5, 7, 9])),
                            ('20 and 3', random.normal(0, 1, 20), random.normal(1, 3, 3)),
                            ('200 and 200', random.normal(0, 1, 200), random.normal(0.5, 1, 200))):
    numbers = len(first), len(second)
    right = abs(ttest_ind(first, second).statistic) * np.sqrt(1 / numbers[0] + 1 / numbers[1])
    from_stats = cohensd_2ind_from_stats(first.mean(), second.mean(), first.std(ddof=1), second.std(ddof=1),
                                         *numbers)
    print(f'{name} values: from t {right:.3f}, from_stats {from_stats:.3f}, cohensd_2ind '
          f'{cohensd_2ind(first, second):.3f}, exchanged {cohensd_2ind(second, first):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

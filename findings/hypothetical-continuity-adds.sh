#!/usr/bin/env bash
# The continuity correction of the Mann-Whitney test in hypothetical makes p-values smaller.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: U is the smaller of the two statistics, so it is below the mean, and the correction adds
#   0.5 to the mean: the distance grows by 0.5 where a correction takes 0.5 from it. It is on by
#   default. Its documented example has a p-value of 0.53 in place of 0.68, and two groups whose rank
#   sums are equal one of 0.89 and not 1. The correction for ties counts those in the first group
#   alone, so that the standard deviation of U changes where the groups are exchanged.
# Expected: larger p-values with the correction than without, and 1 for equal rank sums.
# Instead: scipy.stats.mannwhitneyu.
# Source: Mann and Whitney, On a Test of Whether one of Two Random Variables is Stochastically Larger
#   than the Other, 1947.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
documented example: p 0.531 with the correction and 0.602 without, by scipy 0.676 and 0.602
equal rank sums: p 0.885 with the correction and 1.000 without, by scipy 1.000 and 1.000
groups of 5 without a difference, significant at 0.05: with the correction 5.9 %, without 5.9 %, by scipy 3.5 %
grades with ties: sigma 13.139, the groups exchanged 13.003
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hypothetical.nonparametric import MannWhitney
from scipy import stats

a, b = [139750, 173200, 79750, 11500, 141500], [103450, 124750, 137000, 89565, 102580]
same = [1, 4, 6, 7], [2, 3, 5, 8]
for name, one, other in (('documented example', a, b), ('equal rank sums', *same)):
    with_it, without = MannWhitney(one, other), MannWhitney(one, other, continuity=False)
    right = [stats.mannwhitneyu(one, other, use_continuity=used, method='asymptotic').pvalue for used in (True, False)]
    print(f'{name}: p {with_it.p_value:.3f} with the correction and {without.p_value:.3f} without,',
          f'by scipy {right[0]:.3f} and {right[1]:.3f}')
random = np.random.default_rng(0)
rejected = np.zeros(3)
for _ in range(4000):
    one, other = random.normal(size=5), random.normal(size=5)
    rejected += (MannWhitney(one, other).p_value < 0.05, MannWhitney(one, other, continuity=False).p_value < 0.05,
                 stats.mannwhitneyu(one, other, method='asymptotic').pvalue < 0.05)
print('groups of 5 without a difference, significant at 0.05: with the correction {:.1f} %, without {:.1f} %, by scipy {:.1f} %'.format(*rejected / 40))
grades = [1, 1, 1, 2, 2, 2, 3, 3, 3, 3], [2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
print(f'grades with ties: sigma {MannWhitney(*grades).sigma:.3f}, the groups exchanged {MannWhitney(*grades[::-1]).sigma:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

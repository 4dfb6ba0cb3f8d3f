#!/usr/bin/env bash
# pyirr's rater bias counts agreement as bias.
#
# Packages: pyirr 0.84.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, statsmodels 0.14.5.
# Behaviour: rater_bias is the share of the disagreements in which the first doctor gives the lower
#   grade, and the chi-square test of it. It takes the counts above and below the diagonal from
#   numpy.triu and tril with k=len // 2 - 1 and -len // 2 + 1. For three grades the diagonal, where
#   both agree, is counted as above it, for two grades as above and below it, for four it is right.
#   From six on a part of the disagreements is left out.
# Expected: 50 % and a p-value near 1 where disagreements go in both directions alike.
# Instead: numpy.triu(table, k=1) and numpy.tril(table, k=-1).
# Source: the function rater.bias of the R package irr, which pyirr ports.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'statsmodels==0.14.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pyirr==0.84.1.2'
cat > expected.txt <<'EXPECTED'
2 grades, lower by one: bias 0.54, p-value 0.401; by hand 0.86, 0.008
2 grades, no bias: bias 0.50, p-value 1.000; by hand 0.50, 1.000
3 grades, lower by one: bias 0.95, p-value 0.000; by hand 0.73, 0.033
3 grades, no bias: bias 0.94, p-value 0.000; by hand 0.50, 1.000
4 grades, lower by one: bias 0.65, p-value 0.086; by hand 0.65, 0.086
4 grades, no bias: bias 0.50, p-value 1.000; by hand 0.50, 1.000
6 grades, lower by one: bias 0.50, p-value 1.000; by hand 0.57, 0.232
6 grades, no bias: bias 0.50, p-value 1.000; by hand 0.50, 1.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyirr import rater_bias
from scipy.stats import chi2

for grades in (2, 3, 4, 6):
    table = np.full((grades, grades), 2) + np.eye(grades, dtype=int) * 30
    table[0, 1] += 10  # the first doctor gives the lower grade ten times more
    for name, counts in (('lower by one', table), ('no bias', table - np.triu(table - table.T))):
        ratings = np.array([(i, j) for i in range(grades) for j in range(grades) for _ in range(counts[i, j])])
        seen = rater_bias(ratings)
        above, below = np.triu(counts, 1).sum(), np.tril(counts, -1).sum()
        right = above / (above + below), chi2.sf((above - below) ** 2 / (above + below), 1)
        print(f'{grades} grades, {name}: bias {seen.value:.2f}, p-value {seen.pvalue:.3f};',
              f'by hand {right[0]:.2f}, {right[1]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

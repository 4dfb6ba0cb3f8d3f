#!/usr/bin/env bash
# The chi-square statistic by which autoBinning merges classes is 0 for any two classes of the same size.
#
# Packages: autoBinning 0.1.7, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1.
# Behaviour: The sum has the differences between observed and expected frequencies where their squares
#   belong, and divides by the size of the class and multiplies by the rate where it should divide by the
#   expected frequency. The differences of a table of two by two cancel each other, so that the sum is 0
#   for classes of one size, and has any sign for others. fit(sby='chi') merges the pair with the smallest
#   one.
# Expected: (observed - expected)² / expected: 0 for equal rates, 508 for 5 % and 50 % in 1000 people
#   each.
# Instead: scipy.stats.chi2_contingency, or another package for the classes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' \
  'scipy==1.17.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'autoBinning==0.1.7'
cat > expected.txt <<'EXPECTED'
defaults: score 1 5%, score 2 50%, score 3 50%, score 4 5%, score 5 5%
scores 1 and 2: autoBinning 0.0, chi-square 507.8
scores 2 and 3: autoBinning 0.0, chi-square 0.0
scores 3 and 4: autoBinning 0.0, chi-square 507.8
scores 4 and 5: autoBinning 0.0, chi-square 0.0
limits of the classes after two merges: [1.0, 4.0, 5.0, 6.0]
50 % of 1000 and 10 % of 100: autoBinning 0.02380, chi-square 58.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from autoBinning.utils.backwardSplit import backwardSplit


def chi_square(table):
    table = np.array(table, dtype=float)
    expected = table.sum(axis=0) * table.sum(axis=1, keepdims=True) / table.sum()
    return ((table - expected) ** 2 / expected).sum()


score = np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 1000)
rates = {1: 0.05, 2: 0.50, 3: 0.50, 4: 0.05, 5: 0.05}
default = np.concatenate([np.arange(1000) < 1000 * rate for rate in rates.values()]).astype(int)
print('defaults:', ', '.join(f'score {k} {rate:.0%}' for k, rate in rates.items()))
method = backwardSplit(score, default)
for low in (1, 2, 3, 4):
    bad = [int(default[score == k].sum()) for k in (low, low + 1)]
    right = chi_square([bad, [1000 - b for b in bad]])
    print(f'scores {low} and {low + 1}: autoBinning {method.cal_chisquare_by_range((low, low + 1, low + 2)):.1f}, '
          f'chi-square {right:.1f}')
method.fit(sby='chi', num_split=4)
print('limits of the classes after two merges:', method.bins.tolist())
few = backwardSplit(np.repeat([1.0, 2.0], [1000, 100]), np.r_[np.arange(1000) < 500, np.arange(100) < 10].astype(int))
print(f'50 % of 1000 and 10 % of 100: autoBinning {few.cal_chisquare_by_range((1, 2, 3)):.5f}, '
      f'chi-square {chi_square([[500, 10], [500, 90]]):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

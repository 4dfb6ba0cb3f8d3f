#!/usr/bin/env bash
# episia's exact interval for 0 of n, or n of n, has the limit of half the confidence, not of half
# the error.
#
# Packages: episia 0.1.3, scipy 1.13.1, numpy 1.26.4, pandas 2.2.3.
# Behaviour: proportion_ci(method='clopper_pearson') uses 1 - (confidence / 2) ** (1 / n) where
#   nothing was counted, and the mirror of it where everything was. All other counts are right.
# Expected: 1 - ((1 - confidence) / 2) ** (1 / n), 3.6 % for 0 of 100, as scipy gives. The upper
#   limit for 0 of 100 is then below every one for 1 of 100, and a rate of 3 % lies above it in 5 %
#   of samples only.
# Why it matters here: an attack with no false positives in 100 trials is where an audit of privacy
#   takes its limit from; the lower bound of ε would be 1.6 too large. More confidence makes it
#   smaller.
# Instead: scipy.stats.binomtest(k, n).proportion_ci(method='exact').
# Source: Clopper and Pearson, Biometrika 1934.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'episia==0.1.3'
cat > expected.txt <<'EXPECTED'
0 of 100: episia 0.0000 to 0.0074, exact 0.0000 to 0.0362
1 of 100: episia 0.0003 to 0.0545, exact 0.0003 to 0.0545
99 of 100: episia 0.9455 to 0.9997, exact 0.9455 to 0.9997
100 of 100: episia 0.9926 to 1.0000, exact 0.9638 to 1.0000
upper limits of 0 of 100 at 80, 95 and 99 %: 0.0091, 0.0074, 0.0070
chance to count 0 of 100 where the true share is the limit of 95 %: 0.475, expected 0.025
bound of ε, which is the logarithm of a ratio: larger by 1.59
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from episia.stats.descriptive import proportion_ci
from scipy.stats import binomtest

for count, total in ((0, 100), (1, 100), (99, 100), (100, 100)):
    seen = proportion_ci(count, total, method='clopper_pearson')
    exact = binomtest(count, total).proportion_ci(method='exact')
    print(f'{count} of {total}: episia {seen.ci_lower:.4f} to {seen.ci_upper:.4f}, '
          f'exact {exact.low:.4f} to {exact.high:.4f}')
limits = [proportion_ci(0, 100, method='clopper_pearson', confidence=level).ci_upper for level in (0.8, 0.95, 0.99)]
print('upper limits of 0 of 100 at 80, 95 and 99 %:', ', '.join(f'{limit:.4f}' for limit in limits))
chance = (1 - limits[1]) ** 100
print(f'chance to count 0 of 100 where the true share is the limit of 95 %: {chance:.3f}, expected 0.025')
exact = binomtest(0, 100).proportion_ci(method='exact').high
print(f'bound of ε, which is the logarithm of a ratio: larger by {math.log(exact / limits[1]):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

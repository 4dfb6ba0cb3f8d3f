#!/usr/bin/env bash
# diffpriv-pure releases counts that are never below the true count.
#
# Packages: diffpriv-pure 0.1.0.
# Behaviour: private_count is described as pure ε-DP with shifted geometric noise. The noise is 0 or
#   above, and there is no shift: a release of 9 excludes that the count is 10. The probability of 9
#   is 0.63 for one table and 0 for the other with one person more, and their ratio has no bound.
#   The deviation of gaussian_sigma, which quotes Balle and Wang, is the older formula, which holds
#   for ε below 1: at ε = 10 its δ is more than twice the stated one, at ε = 100 it is 1.
# Expected: two-sided geometric noise, with a probability of (1 − exp(−ε)) / (1 + exp(−ε)) for the
#   true count; the analytic Gaussian mechanism of the paper.
# Why it matters here: the smallest of some releases is the true count.
# Instead: a library whose mechanisms are tested, such as OpenDP.
# Source: Ghosh, Roughgarden and Sundararajan 2009, arXiv:0811.2841; Balle and Wang 2018,
#   arXiv:1805.06530.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'diffpriv-pure==0.1.0'
cat > expected.txt <<'EXPECTED'
true count 9: smallest release 9; 8: 0.00, 9: 0.63, 10: 0.23, 11: 0.09, 12: 0.03
true count 10: smallest release 10; 8: 0.00, 9: 0.00, 10: 0.63, 11: 0.23, 12: 0.09
epsilon 1, delta 1e-05: deviation 4.8448, true delta 4.1e-08
epsilon 10, delta 1e-05: deviation 0.4845, true delta 2.3e-05
epsilon 100, delta 1e-05: deviation 0.0484, true delta 1.0e+00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math
import random
from collections import Counter

from diffpriv_pure import gaussian_sigma, private_count

random.seed(0)
for count in (9, 10):
    released = Counter(private_count(count, epsilon=1.0) for _ in range(100_000))
    shares = ', '.join(f'{value}: {released[value] / 100_000:.2f}' for value in range(8, 13))
    print(f'true count {count}: smallest release {min(released)}; {shares}')
for epsilon in (1, 10, 100):
    sigma = gaussian_sigma(1.0, epsilon, 1e-5)
    normal = lambda value: math.erfc(-value / math.sqrt(2)) / 2
    delta = normal(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * normal(-1 / (2 * sigma) - epsilon * sigma)
    print(f'epsilon {epsilon}, delta 1e-05: deviation {sigma:.4f}, true delta {delta:.1e}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

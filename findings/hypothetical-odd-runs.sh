#!/usr/bin/env bash
# The runs test of hypothetical leaves most orders with an odd number of runs out of its probability.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: the documented probability of r runs or fewer has k with r = 2k - 1 in the terms of odd r.
#   RunsTest puts r itself in the place of k, so these terms are nearly all 0: the probability of so
#   many runs or fewer in the documented example of 15 people is 0.77 where 0.99 of the orders have so
#   many or fewer. The same formula is in its Wald-Wolfowitz test.
# Expected: the share of all orders that have r runs or fewer, counted here one by one.
# Instead: count the orders, or take the normal approximation.
# Source: Siegel, Nonparametric Statistics, 1956.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
mmmffff, 2 runs: probability of so many or fewer 0.057, counted 0.057
mfmmfff, 4 runs: probability of so many or fewer 0.657, counted 0.543
mfmfmff, 6 runs: probability of so many or fewer 0.829, counted 0.971
mfmfmmfmfm, 9 runs: probability of so many or fewer 0.771, counted 1.000
mfmfmmmffmfmfmf, 12 runs: probability of so many or fewer 0.767, counted 0.988
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import combinations, groupby

from hypothetical.nonparametric import RunsTest

def count(first, total, runs):
    orders = 0
    places = list(combinations(range(total), first))
    for chosen in places:
        marks = [place in chosen for place in range(total)]
        orders += sum(1 for _ in groupby(marks)) <= runs
    return orders / len(places)

for signs in ('mmmffff', 'mfmmfff', 'mfmfmff', 'mfmfmmfmfm', 'mfmfmmmffmfmfmf'):
    seen = RunsTest(list(signs))
    right = count(signs.count('m'), len(signs), seen.r)
    print(f'{signs}, {seen.r} runs: probability of so many or fewer {float(seen.test_summary["probability"]):.3f}, counted {right:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

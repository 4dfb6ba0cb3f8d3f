#!/usr/bin/env bash
# The paired comparison of two prediction probabilities in pk4adi has half of the p-value that it should have: two
# indicators that do not differ have a p-value of 0.5, and of comparisons without a difference 9 % are significant at 0.05.
#
# Packages: pk4adi 0.1.4, pandas 2.2.3, numpy 1.26.4, scipy 1.14.1, tabulate 0.9.0.
# Behaviour: compare_pks tests the difference of two PK values with a z-test for groups and a t-test for pairs. The p-value
#   of the z-test is two-sided. The one of the t-test is the upper tail of the absolute statistic, so half of the two-sided
#   one and never above 0.5. Both are printed side by side as "P value" with the same comment.
# Expected: 2 * t.sf(|T|, df), as for the z-test, since nothing says which indicator should be the better one.
# Instead: double ans["TP"], or take scipy.stats.t on ans["TD"] and ans["DF"].
# Source: Smith, Dutton and Smith, Measuring the performance of anesthetic depth indicators, Anesthesiology 84 (1996),
#   whose paired-data jackknife t-test is two-sided.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pk4adi==0.1.4' 'pandas==2.2.3' 'numpy==1.26.4' 'scipy==1.14.1' 'tabulate==0.9.0'
cat > expected.txt <<'EXPECTED'
t = +1.78: pk4adi p = 0.042, two-sided 0.083; z = +1.76: pk4adi p = 0.078
t = +0.10: pk4adi p = 0.459, two-sided 0.919; z = +0.03: pk4adi p = 0.980
t = -1.76: pk4adi p = 0.043, two-sided 0.086; z = -1.60: pk4adi p = 0.109
largest p-value of 400 comparisons: 0.50
without a difference, significant at 0.05: pk4adi 8.8%, two-sided 4.2%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from scipy.stats import t
from pk4adi.pk import calculate_pk
from pk4adi.pkc import compare_pks

random = np.random.default_rng(0)

def compare(people=40):
    depth = random.integers(0, 4, people)
    first = depth + random.normal(0, 2, people)
    second = depth + random.normal(0, 2, people)
    pair = [calculate_pk(list(values), list(depth), auto_print=False) for values in (first, second)]
    return compare_pks(*pair, auto_print=False)

answers = [compare() for _ in range(400)]
for answer in answers[:3]:
    print(f"t = {answer['TD']:+.2f}: pk4adi p = {answer['TP']:.3f}, two-sided {2 * t.sf(abs(answer['TD']), answer['DF']):.3f};",
          f"z = {answer['ZD']:+.2f}: pk4adi p = {answer['ZP']:.3f}")
print(f"largest p-value of 400 comparisons: {max(answer['TP'] for answer in answers):.2f}")
print(f"without a difference, significant at 0.05: pk4adi {np.mean([answer['TP'] < 0.05 for answer in answers]):.1%},",
      f"two-sided {np.mean([2 * t.sf(abs(answer['TD']), answer['DF']) < 0.05 for answer in answers]):.1%}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The two-sided binomial test of hypothetical depends on which of the two classes is counted.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: BinomialTest adds the probabilities from x to n that are not above the one of x, and
#   doubles the sum. Below half of n these are x itself and the opposite tail, so the one of x is
#   counted twice: 9 of 10 have a p-value of 0.021, 1 of 10 one of 0.041, and 2 of 10 one of 0.20 in
#   place of 0.11. For alternative='greater' the same sum leaves out what is more probable than x: 3
#   of 10 or more have 0.29 in place of 0.95. SignTest uses it, so that its p-value doubles where the
#   two columns are exchanged.
# Expected: the same two-sided p-value for 1 and 9 of 10, and for both orders of the columns.
# Instead: scipy.stats.binomtest.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
1 of 10: two-sided 0.0410, exact 0.0215
2 of 10: two-sided 0.1973, exact 0.1094
8 of 10: two-sided 0.1094, exact 0.1094
9 of 10: two-sided 0.0215, exact 0.0215
3 of 10 or more: 0.289, exact 0.945
7 of 10 or more: 0.172, exact 0.172
sign test, before and after: 0.0215, after and before: 0.0410
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hypothetical.hypothesis import BinomialTest
from hypothetical.nonparametric import SignTest
from scipy import stats

for better in (1, 2, 8, 9):
    seen = BinomialTest(10, better).p_value
    print(f'{better} of 10: two-sided {seen:.4f}, exact {stats.binomtest(better, 10).pvalue:.4f}')
for better in (3, 7):
    seen = BinomialTest(10, better, alternative='greater').p_value
    right = stats.binomtest(better, 10, alternative='greater').pvalue
    print(f'{better} of 10 or more: {seen:.3f}, exact {right:.3f}')
before, after = [5, 6, 7, 5, 6, 8, 7, 6, 5, 7], [4, 5, 6, 4, 5, 7, 6, 5, 4, 8]
print(f'sign test, before and after: {SignTest(before, after).p_value:.4f},',
      f'after and before: {SignTest(after, before).p_value:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

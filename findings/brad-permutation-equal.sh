#!/usr/bin/env bash
# The permutation test of brad leaves out permutations that are as extreme as what was observed:
# the most extreme result has a p-value of 0.
#
# Packages: brad 0.2.0a0, numpy 1.26.4, scipy 1.13.1, scikit-learn 1.5.2.
# Behaviour: p_value counts the permutations whose statistic is above the observed one, and not
#   the equal ones, of which the observed order is one. With three people in each group, where no
#   p-value can be below 1/20, it is 0 for the most extreme order. Where answers are yes or no
#   most permutations are ties: two groups of ten without a difference in a proportion differ in
#   13 % of the comparisons at 0.05 (its numbers have no seed).
# Expected: the share of permutations that are at least as extreme, with the observed one counted.
# Instead: (1 + (replications >= observation).sum()) / (1 + len(replications)).
# Source: Phipson and Smyth, Permutation P-values Should Never Be Zero, 2010; Fisher's exact test
#   for two proportions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1' 'scikit-learn==1.5.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'brad==0.2.0a0'
cat > expected.txt <<'EXPECTED'
groups [1.0, 2.0, 3.0] and [4.0, 5.0, 6.0]: p 0.00, exact 0.05
groups [1.0, 2.0, 4.0] and [3.0, 5.0, 6.0]: p 0.05, exact 0.10
two groups of 10 with a proportion of one half, at 0.05: brad finds a difference in more than 10 %, the exact test in 2%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from brad import permutation_test
from scipy import stats

def difference(data, labels):
    return float(data[labels == 1].mean() - data[labels == 0].mean())

labels = np.array([0, 0, 0, 1, 1, 1])
for data in ([1.0, 2, 3, 4, 5, 6], [1.0, 2, 4, 3, 5, 6]):
    data = np.array(data)
    seen = permutation_test(data, labels, 100000, statistic=difference).p_value()
    exact = stats.permutation_test((data[3:], data[:3]), lambda a, b: a.mean() - b.mean(), alternative='greater').pvalue
    print(f'groups {data[:3].tolist()} and {data[3:].tolist()}: p {seen:.2f}, exact {exact:.2f}')
labels = np.repeat([0, 1], 10)
reject = [0.0, 0.0]
for cases in range(11):
    for others in range(11):
        data = np.array([1.0] * others + [0.0] * (10 - others) + [1.0] * cases + [0.0] * (10 - cases))
        chance = stats.binom.pmf(cases, 10, 0.5) * stats.binom.pmf(others, 10, 0.5)
        table = [[cases, 10 - cases], [others, 10 - others]]
        if permutation_test(data, labels, 400, statistic=difference).p_value() < 0.05:
            reject[0] += chance
        if stats.fisher_exact(table, alternative='greater')[1] < 0.05:
            reject[1] += chance
print('two groups of 10 with a proportion of one half, at 0.05: brad finds a difference in',
      f'{"more" if reject[0] > 0.1 else "less"} than 10 %, the exact test in {reject[1]:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# A bias of exactly 0 has a p-value of 0.001 in fair-scoring.
#
# Packages: fair-scoring 0.2.1, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6.
# Behaviour: the permutation test counts the permutations with a larger bias, and not those with an
#   equal one. Where everybody has the same score no permutation is larger, and the p-value is the
#   smallest possible.
# Expected: the share of permutations whose bias is at least as large, 1 for a bias of 0.
# Why it matters here: scores in classes, such as grades, often have permutations with an equal
#   bias.
# Instead: permute the groups by hand and count with >=.
# Source: Phipson and Smyth, Permutation P-values Should Never Be Zero, Statistical Applications in
#   Genetics and Molecular Biology 2010.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.9.1' 'scipy==1.17.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fair-scoring==0.2.1'
cat > expected.txt <<'EXPECTED'
the same score for everybody: bias 0.00, p-value 0.001, by counting equal ones too 1.000
one of ten people of each group has a better grade: bias 0.00, p-value 0.462, by counting equal ones too 1.000
one more person of group b has it: bias 0.10, p-value 0.197, by counting equal ones too 1.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from fairscoring.metrics import WassersteinMetric

metric = WassersteinMetric('IND', 'Wasserstein')


def right(scores, group):
    """Return the p-value by a permutation test that counts equal differences."""
    random = np.random.default_rng(1)
    bias = lambda order: abs(scores[order == 'a'].mean() - scores[order == 'b'].mean())
    larger = [bias(random.permutation(group)) >= bias(group) - 1e-12 for _ in range(999)]
    return (1 + sum(larger)) / 1000


group = np.array(['a'] * 10 + ['b'] * 10)
for label, scores in (('the same score for everybody', np.full(20, 0.7)), ('one of ten people of each group has a better grade', np.tile([1.0] * 9 + [2.0], 2)),
                      ('one more person of group b has it', np.array([1.0] * 9 + [2.0] + [1.0] * 8 + [2.0] * 2))):
    seen = metric.bias(scores, np.zeros(20, dtype=int), group, ['a', 'b'], 0, n_permute=999, seed=0)
    print(f'{label}: bias {seen.bias:.2f}, p-value {seen.p_value:.3f}, by counting equal ones too {right(scores, group):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The two-sided p-value of permutation_test is the smaller one of the two one-sided p-values.
#
# Packages: permutation-test 0.18, numpy 1.23.5.
# Behaviour: permutationtest documents that it returns the two-sided p-value, the probability that
#   the data do not differ. It computes the one-sided p-values of both directions from a histogram
#   of the permuted differences, and returns the smaller one without doubling it. Twice as many
#   comparisons of equal groups are significant as should be: 12 of 100 at 0.05 where the exact
#   test finds 6.
# Expected: the share of the permutations whose difference is at least as large in absolute value.
# Instead: scipy.stats.permutation_test.
# Source: Ernst, Permutation Methods: A Basis for Exact Inference, Statistical Science 2004, which
#   it cites.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'permutation-test==0.18'
cat > expected.txt <<'EXPECTED'
p 0.040; exact two-sided 0.079, one-sided 0.040
p 0.034; exact two-sided 0.062, one-sided 0.031
p 0.004; exact two-sided 0.007, one-sided 0.003
p 0.044; exact two-sided 0.058, one-sided 0.029
100 comparisons without a difference at 0.05: 12 significant, by the exact test 6
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
from itertools import combinations

import numpy as np
from permutation_test import permutationtest

def seen(a, b):
    with contextlib.redirect_stdout(io.StringIO()):
        return permutationtest(list(a), list(b), verbose=False)

def exact(a, b):
    values = np.concatenate([a, b])
    total = values.sum()
    differences = np.array([values[list(c)].sum() / len(a) - (total - values[list(c)].sum()) / len(b)
                            for c in combinations(range(len(values)), len(a))])
    observed = np.mean(a) - np.mean(b)
    one = min(np.mean(differences >= observed - 1e-9), np.mean(differences <= observed + 1e-9))
    return np.mean(np.abs(differences) >= abs(observed) - 1e-9), one

random = np.random.default_rng(0)
pairs = [(random.normal(size=7), random.normal(size=7)) for _ in range(100)]
results = [(seen(a, b), *exact(a, b)) for a, b in pairs]
for p, two, one in [result for result in results if result[0] < 0.05][:4]:
    print(f'p {p:.3f}; exact two-sided {two:.3f}, one-sided {one:.3f}')
print(f'100 comparisons without a difference at 0.05: {sum(r[0] < 0.05 for r in results)} significant, '
      f'by the exact test {sum(r[1] < 0.05 for r in results)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

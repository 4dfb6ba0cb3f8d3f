#!/usr/bin/env bash
# fast-cindex asks for risk scores and counts them as survival times, so a perfect model has a
# concordance of 0.
#
# Packages: fast-cindex 0.1.0, numpy 2.4.6.
# Behaviour: the argument scores is described as "higher value = higher predicted risk". A pair
#   counts as right where the one who dies first has the lower score. The index of a risk is 1 minus
#   the right one, in cindex, in both bootstraps and in the comparison of two models, whose
#   difference has the wrong sign.
# Expected: 1 for a risk that falls with the time of death, as in scikit-survival. An example of the
#   documents passes a negated hazard and calls it a risk.
# Why it matters here: the better of two models loses; near 0.5 nobody notices.
# Instead: pass the negated risk, and try a perfect one first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fast-cindex==0.1.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
risk in the documents: True
perfect risk: 0.0
good model: fast-cindex 0.264, over all pairs 0.736
poor model: fast-cindex 0.460, over all pairs 0.540
resamples in which the good model wins: 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from fast_cindex import cindex, compare_cindex


def compare_pairs(time, risk, died):
    pairs = [(i, j) for i in np.flatnonzero(died) for j in np.flatnonzero(time > time[i])]
    return np.mean([(risk[i] > risk[j]) + (risk[i] == risk[j]) / 2 for i, j in pairs])


print('risk in the documents:', 'higher predicted risk' in cindex.__doc__)
print('perfect risk:', cindex([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1, 1, 1, 1, 1]))
random = np.random.default_rng(0)
health = random.normal(size=200)
death, end = random.exponential(np.exp(health)), random.exponential(5, size=200)
time, died = np.minimum(death, end), (death <= end).astype(int)
good, poor = -health, -health + 3 * random.normal(size=200)
for name, risk in (('good', good), ('poor', poor)):
    print(f'{name} model: fast-cindex {cindex(time, risk, died):.3f},',
          f'over all pairs {compare_pairs(time, risk, died):.3f}')
first, second = compare_cindex(time, died, good, poor, n_bootstraps=100)
print(f'resamples in which the good model wins: {np.mean(first > second):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

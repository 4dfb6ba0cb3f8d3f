#!/usr/bin/env bash
# evalci needs more items the more alike two models answer: 422 in place of 93 where they share 60 % of the
# items, since it lets the shared ones have no difference.
#
# Packages: evalci 0.1.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: power(delta, method='simulation', rho=r) simulates a paired design. On a share r of the items
#   both models have the same answer, right with the mean of their accuracies, and differ on none of them.
#   The models that are compared differ by (1 - r) * delta, not by delta.
# Expected: r changes how alike the answers are and not how good the models are. Pairing removes the
#   difficulty of the items, so fewer are needed. By hand, one number decides for both models whether a
#   shared item is answered: var = r delta + (1 - r) (p (1 - q) + q (1 - p)) - delta**2.
# Why it matters here: the simulation is documented for correlated items, and makes a paired evaluation
#   look several times as expensive as it is.
# Instead: the formula, or delta / (1 - r) as delta with baseline lowered by half of what is added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'evalci==0.1.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
rho 0.0: items needed by hand 167, evalci 170; power of 100 items by hand 0.57, evalci 0.58
rho 0.3: items needed by hand 130, evalci 239; power of 100 items by hand 0.68, evalci 0.44
rho 0.6: items needed by hand 93, evalci 422; power of 100 items by hand 0.82, evalci 0.26
rho 0.8: items needed by hand 69, evalci 836; power of 100 items by hand 0.93, evalci 0.15
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import evalci
import numpy as np
from scipy.stats import norm

BASELINE, DELTA = 0.5, 0.15
better = BASELINE + DELTA
quantiles = norm.ppf(0.975) + norm.ppf(0.8)


def count_by_hand(shared):
    apart = BASELINE * (1 - better) + better * (1 - BASELINE)
    variance = shared * DELTA + (1 - shared) * apart - DELTA**2
    return quantiles**2 * variance / DELTA**2


def simulate_by_hand(shared, number, repeats=4000):
    random = np.random.default_rng(0)
    first, second = random.random((2, repeats, number))
    second = np.where(random.random((repeats, number)) < shared, first, second)
    differences = (second < better).astype(float) - (first < BASELINE)
    error = differences.std(axis=1, ddof=1) / np.sqrt(number)
    return np.mean(np.abs(differences.mean(axis=1)) > norm.ppf(0.975) * error)


for shared in (0.0, 0.3, 0.6, 0.8):
    needed = evalci.power(delta=DELTA, baseline=BASELINE, method='simulation', rho=shared, sims=2000,
                          random_state=0).n
    found = evalci.power(delta=DELTA, n=100, baseline=BASELINE, method='simulation', rho=shared, sims=2000,
                         random_state=0).power
    print(f'rho {shared}: items needed by hand {count_by_hand(shared):.0f}, evalci {needed}; '
          f'power of 100 items by hand {simulate_by_hand(shared, 100):.2f}, evalci {found:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

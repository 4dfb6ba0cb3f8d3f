#!/usr/bin/env bash
# The Laplace noise of syndp is the same number for each value, unless a seed is given for each.
#
# Packages: syndp 0.5.2, numpy 2.2.6, scipy 1.15.3, scikit-learn 1.6.1, pandas 2.2.3.
# Behaviour: laplace_mechanism and boundedlaplacemechanism seed NumPy's global generator with their
#   seed, which is 0 by default, before they draw. The noise is a constant that everybody can compute:
#   subtracted, it leaves the value, for each ε. The generator of the calling program is set back each
#   time as well, so that its own random numbers repeat.
# Expected: fresh noise for each call, and values that differ by noise and not by their difference.
# Why it matters here: the noise is all that protects the value.
# Instead: seed=None for each call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'scikit-learn==1.6.1' 'pandas==2.2.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'syndp==0.5.2'
cat > expected.txt <<'EXPECTED'
epsilon 0.1: differences of the weights [13.5 32.5], of the noisy ones [13.5 32.5]
  with seed=None the same differences: False
epsilon 1: differences of the weights [13.5 32.5], of the noisy ones [13.5 32.5]
  with seed=None the same differences: False
bounded mechanism: different results of 100 calls 1
random numbers of the caller: [0.715, 0.715, 0.715]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from syndp import boundedlaplacemechanism, laplace_mechanism

weights = [58.0, 71.5, 104.0]
for epsilon in (0.1, 1):
    noisy = [laplace_mechanism(weight, 1, epsilon) for weight in weights]
    print(f'epsilon {epsilon}: differences of the weights {np.diff(weights)}, of the noisy ones',
          np.round(np.diff(noisy), 6) + 0)
    fresh = [laplace_mechanism(weight, 1, epsilon, seed=None) for weight in weights]
    print('  with seed=None the same differences:', np.allclose(np.diff(fresh), np.diff(weights)))
twice = {boundedlaplacemechanism(0.3, (0, 1), 1, 1, 1e-6) for _ in range(100)}
print('bounded mechanism: different results of 100 calls', len(twice))
drawn = []
for _ in range(3):
    laplace_mechanism(0, 1, 1)
    drawn.append(round(np.random.uniform(), 3))
print('random numbers of the caller:', drawn)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

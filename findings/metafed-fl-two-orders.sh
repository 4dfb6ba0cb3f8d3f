#!/usr/bin/env bash
# The Rényi accounting of metafed-fl adds the divergence of one order to the conversion of another.
#
# Packages: metafed-fl 1.0.0, torch 2.13.0, numpy 2.4.6, scipy 1.17.1.
# Behaviour: compute_rdp_epsilon takes the smallest divergence, which belongs to the smallest order, and
#   adds log(1 / δ) / (order - 1) for the smallest of the orders without the first one. With two orders
#   these are the divergence of the first and the conversion of the second. The sum belongs to no order,
#   and for orders that are far apart it is below the true ε; for other orders it is several times too
#   large.
# Expected: the smallest sum of one order, "Epsilon for given delta using RDP", which is never below the ε
#   of the exact formula.
# Instead: min(steps * order / (2 * noise ** 2) + log(1 / delta) / (order - 1) for order in orders).
# Source: Mironov, Rényi Differential Privacy, 2017, propositions 1, 3 and 7; Balle and Wang, Improving
#   the Gaussian Mechanism for Differential Privacy, 2018, theorem 8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' \
  'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'metafed-fl==1.0.0'
cat > expected.txt <<'EXPECTED'
100 rounds with a noise of 4.84: exact epsilon 10.39
orders 2 and 64: by definition 15.77, metafed-fl 4.44
orders 2 and 256: by definition 15.77, metafed-fl 4.31
orders 2 to 64: by definition 12.15, metafed-fl 10.02
orders 1.1 to 10.9: by definition 12.04, metafed-fl 59.91
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math
import os
import sys
import types

# the package imports models and data sets at once, which are not needed here
package = types.ModuleType('metafed')
package.__path__ = [next(f'{folder}/metafed' for folder in sys.path if os.path.isdir(f'{folder}/metafed'))]
sys.modules['metafed'] = package
from metafed.privacy.differential_privacy import DifferentialPrivacy
from scipy.optimize import brentq
from scipy.stats import norm

delta, steps = 1e-5, 100
privacy = DifferentialPrivacy(epsilon=1.0, delta=delta)
noise = math.sqrt(2 * math.log(1.25 / delta))
shift = math.sqrt(steps) / noise
exact = brentq(lambda e: norm.cdf(shift / 2 - e / shift) - math.exp(e) * norm.cdf(-shift / 2 - e / shift) - delta, 0.01, 100)
print(f'{steps} rounds with a noise of {noise:.2f}: exact epsilon {exact:.2f}')
for name, orders in (('2 and 64', [2, 64]), ('2 and 256', [2, 256]), ('2 to 64', list(range(2, 65))),
                     ('1.1 to 10.9', [1 + tenth / 10 for tenth in range(1, 100)])):
    right = min(steps * order / (2 * noise**2) + math.log(1 / delta) / (order - 1) for order in orders)
    print(f'orders {name}: by definition {right:.2f}, metafed-fl {privacy.compute_rdp_epsilon(orders, steps):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

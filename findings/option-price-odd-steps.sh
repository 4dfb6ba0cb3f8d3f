#!/usr/bin/env bash
# The binomial tree of option-price has another price for odd numbers of steps.
#
# Packages: option-price 0.2.0, numpy 1.23.5, scipy 1.10.1.
# Behaviour: getPrice with method='BT' sets up the prices at the end of the tree in two halves. For an
#   odd number of steps the middle of the row is wrong, so that shares end lower than they should. A
#   put of 5.57 is 8.62 with 5 steps, 5.90 with 51 and 5.61 with 501, and a call of 10.45 is 7.86,
#   10.18 and 10.42. Put and call are too dear and too cheap by about the same.
# Expected: 5.93, 5.61 and 5.58 for the put, 10.81, 10.49 and 10.45 for the call.
# Instead: use an even number of steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'option-price==0.2.0' 'numpy==1.23.5' 'scipy==1.10.1'
cat > expected.txt <<'EXPECTED'
put: 5.57 by the formula
  4 steps: 5.09, by hand 5.09
  5 steps: 8.62, by hand 5.93
  50 steps: 5.53, by hand 5.53
  51 steps: 5.90, by hand 5.61
  500 steps: 5.57, by hand 5.57
  501 steps: 5.61, by hand 5.58
call: 10.45 by the formula
  4 steps: 9.97, by hand 9.97
  5 steps: 7.86, by hand 10.81
  50 steps: 10.41, by hand 10.41
  51 steps: 10.18, by hand 10.49
  500 steps: 10.45, by hand 10.45
  501 steps: 10.42, by hand 10.45
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from optionprice import Option


def tree(kind, steps):
    dt = 1 / steps
    up = np.exp(0.2 * np.sqrt(dt))
    p = (np.exp(0.05 * dt) - 1 / up) / (up - 1 / up)
    value = np.maximum(kind * (100 * up ** np.arange(steps, -steps - 1, -2.0) - 100), 0)
    for _ in range(steps):
        value = np.exp(-0.05 * dt) * (p * value[:-1] + (1 - p) * value[1:])
    return value[0]


for kind in ('put', 'call'):
    option = Option(european=True, kind=kind, s0=100, k=100, r=0.05, sigma=0.2, t=365)
    print(f'{kind}: {option.getPrice("BSM"):.2f} by the formula')
    for steps in (4, 5, 50, 51, 500, 501):
        print(f'  {steps} steps: {option.getPrice("BT", iteration=steps):.2f}, by hand {tree(1 if kind == "call" else -1, steps):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

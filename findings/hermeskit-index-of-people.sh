#!/usr/bin/env bash
# The population stability index of hermeskit takes each person for a variable: for three variables of 500 people it
# returns 500 numbers, near 8 where nothing has changed.
#
# Packages: hermeskit 1.0.7, numpy 1.26.4, pandas 2.3.3, scikit-learn 1.5.2, ipython 8.31.0, pyyaml 6.0.2.
# Behaviour: calculate_psi documents an axis by which variables are defined, "0 for vertical, 1 for horizontal", with
#   a default of 0, and slices the table by rows for 0. The "distribution" of a person over three variables has
#   no bins in common with the next one. With axis=1 it returns the three numbers.
# Expected: one number for each column by default.
# Instead: axis=1 for tables with people in rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scikit-learn==1.5.2' 'ipython==8.31.0' 'pyyaml==6.0.2' 'hermeskit==1.0.7'
cat > expected.txt <<'EXPECTED'
default: 500 numbers, mean 7.31
the same people in another order: 500 numbers, mean 8.02
axis=1: [0.01, 0.02, 0.79]
by hand: [0.01, 0.02, 0.79]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hermeskit.metrics import calculate_psi

random = np.random.default_rng(0)
before, after = random.normal(size=(500, 3)), random.normal(size=(500, 3))
after[:, 2] += 1

def by_hand(old, new):
    limits = np.quantile(old, np.arange(0.1, 1, 0.1))
    shares = [np.bincount(np.searchsorted(limits, x), minlength=10) / len(x) for x in (old, new)]
    return sum((b - a) * np.log(b / a) for a, b in zip(*shares))

default = calculate_psi(before, after)['psi']
print(f'default: {len(default)} numbers, mean {default.mean():.2f}')
same = calculate_psi(before, random.permutation(before))['psi']
print(f'the same people in another order: {len(same)} numbers, mean {same.mean():.2f}')
print('axis=1:', calculate_psi(before, after, axis=1)['psi'].round(2).tolist())
print('by hand:', [round(float(by_hand(before[:, i], after[:, i])), 2) for i in range(3)])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# shiftES finds a large effect between a sample and itself where values repeat.
#
# Packages: shiftES 1.0.7, numpy 2.4.6, pandas 2.3.3.
# Behaviour: effectsize is the share of differences below the median difference, taken to -1 to 1,
#   where 0 is no effect and 0.4 a large one. A comment in the code says "less than or equal", the
#   code counts less, and neither gives ties half. With 0, 1 and 2 children a third of all
#   differences is 0, so that a sample compared with itself has an effect of -0.36. Exchanging two
#   groups does not change the sign: -0.60 one way is -0.04 the other way. Decimals that do not
#   repeat are right but for the pairs of a value with itself.
# Expected: 0 for equal samples, and the opposite effect for exchanged ones.
# Instead: count ties half, or add noise that is small against the unit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'shiftES==1.0.7'
cat > expected.txt <<'EXPECTED'
children with themselves: -0.36, ties counted half 0.00
many children with few: -0.60, ties counted half -0.28
few children with many: -0.04, ties counted half 0.28
equal values with themselves: -1.00, ties counted half 0.00
decimals with themselves: -0.01, ties counted half 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from shiftES.shiftes import effectsize

def by_hand(first, second):
    differences = np.subtract.outer(first, second).ravel()
    median = np.median(differences)
    shifted = differences - median
    return (np.mean(shifted < median) + np.mean(shifted == median) / 2 - 0.5) / 0.5

random = np.random.default_rng(0)
few, many = np.repeat([0.0, 1, 2], [40, 40, 20]), np.repeat([0.0, 1, 2], [20, 40, 40])
equal, continuous = np.repeat(3.0, 20), random.normal(size=100)
pairs = {
    'children with themselves': (few, few), 'many children with few': (many, few), 'few children with many': (few, many),
    'equal values with themselves': (equal, equal), 'decimals with themselves': (continuous, continuous),
}
for name, (first, second) in pairs.items():
    print(f'{name}: {effectsize(first, second):.2f}, ties counted half {by_hand(first, second):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

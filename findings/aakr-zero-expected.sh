#!/usr/bin/env bash
# The expected values of aakr are 0 for each reading that is far from the normal ones.
#
# Packages: aakr 0.0.1a0, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6, pandas 2.3.3.
# Behaviour: The expected values under normal conditions are a mean of the normal readings, weighted by
#   exp(-d²/2) of their distance. From a distance of 39 bandwidths on each weight is 0 in double
#   precision. The sum 0 is replaced by 1, and the mean of the normal readings is 0 for all signals, those
#   that are normal included. No message says so. With signals in their own units and the default
#   bandwidth of 1 this is an ordinary distance.
# Expected: a mean of normal readings lies between the smallest and the largest of them; far away it is
#   near the nearest one, or missing.
# Why it matters here: the difference to the expected values is the alarm, and it shows the signal that is
#   at fault.
# Instead: scale the signals before, and subtract the smallest distance in the exponent, as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'aakr==0.0.1a0'
cat > expected.txt <<'EXPECTED'
normal: 2883 to 3083 turns, 52 to 66 degrees
reading 3000, 60: aakr expects 3000, 60; the weighted mean is 3000, 60
reading 3080, 60: aakr expects 3083, 62; the weighted mean is 3083, 62
reading 3150, 60: aakr expects 0, 0; the weighted mean is 3083, 62
reading 3000, 110: aakr expects 0, 0; the weighted mean is 3004, 65
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from aakr import AAKR

random = np.random.default_rng(0)
normal = random.normal([3000, 60], [30, 2], size=(500, 2))
model = AAKR(n_jobs=1).fit(normal)
print(f'normal: {normal[:, 0].min():.0f} to {normal[:, 0].max():.0f} turns, '
      f'{normal[:, 1].min():.0f} to {normal[:, 1].max():.0f} degrees')
for reading in ([3000.0, 60.0], [3080.0, 60.0], [3150.0, 60.0], [3000.0, 110.0]):
    expected = model.transform(np.array([reading]))[0]
    distance = ((normal - reading) ** 2).sum(axis=1) / 2
    weights = np.exp(distance.min() - distance)
    right = weights @ normal / weights.sum()
    print(f'reading {reading[0]:.0f}, {reading[1]:.0f}: aakr expects {expected[0]:.0f}, {expected[1]:.0f}; '
          f'the weighted mean is {right[0]:.0f}, {right[1]:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

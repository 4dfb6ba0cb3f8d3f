#!/usr/bin/env bash
# The private clamped mean of eeprivacy does not clamp the values that it averages.
#
# Packages: eeprivacy 0.0.5, numpy 2.4.6, scipy 1.17.1.
# Behaviour: PrivateClampedMean is described as bounding sensitivity with clamping, with a lower and
#   an upper bound. The sum is that of the values as they are; noise for the width of the bounds is
#   added, and only the result is clamped. One record changes the mean by any amount.
#   PrivateClampedSum clamps the values.
# Expected: the mean of clamped values, 5.005, and a probability that changes by a factor of e at
#   most.
# Why it matters here: a release of 10.00 shows that the factory is in the table.
# Instead: np.clip before the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'eeprivacy==0.0.5'
cat > expected.txt <<'EXPECTED'
1000 homes: clamped mean 5.000; private means from 4.93 to 5.08; private sums from 4928 to 5058
with a factory: clamped mean 5.005; private means from 10.00 to 10.00; private sums from 4922 to 5099
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from eeprivacy.operations import PrivateClampedMean, PrivateClampedSum

np.random.seed(0)
homes = np.full(1000, 5.0)  # kilowatt hours; the bounds are 0 and 10
factory = np.append(homes, 100_000.0)
for title, values in {'1000 homes': homes, 'with a factory': factory}.items():
    means = [PrivateClampedMean(lower_bound=0, upper_bound=10).execute(values=values, epsilon=1.0) for _ in range(1000)]
    sums = [PrivateClampedSum(lower_bound=0, upper_bound=10).execute(values=values, epsilon=1.0) for _ in range(1000)]
    print(f'{title}: clamped mean {np.clip(values, 0, 10).mean():.3f}; private means from {min(means):.2f} to '
          f'{max(means):.2f}; private sums from {min(sums):.0f} to {max(sums):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The private synthetic tables of dpart end at the smallest and largest value of the real one,
# whatever bounds are given.
#
# Packages: dpart 0.1.2, diffprivlib 0.6.0, scikit-learn 1.1.3, scipy 1.10.1, pandas 1.5.3, numpy
#   1.23.5.
# Behaviour: the bounds of a column become the feature_range of a MinMaxScaler. It learns the
#   smallest and the largest value of the data, stretches them to the bounds, and turns the
#   synthetic values back with them. The bounds have no effect on the result; the noise for epsilon
#   is added to counts between the two true values.
# Expected: synthetic values between the given bounds, whose ends do not depend on a single person.
#   A guarantee for epsilon = 1 cannot be given where one person decides which values are possible.
# Why it matters here: the largest value belongs to one patient, and is read from the synthetic
#   table.
# Instead: clip the column to its bounds, and add two rows at the bounds before fitting.
# Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014, definition
#   2.4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.1.3' 'scipy==1.10.1' 'pandas==1.5.3' 'numpy==1.23.5' 'joblib==1.4.2' 'setuptools==68.2.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'diffprivlib==0.6.0' 'dpart==0.1.2'
cat > expected.txt <<'EXPECTED'
nobody above 160, bounds 0 to 300: synthetic pressures from 90 to 157, epsilon 1.0
nobody above 160, bounds 60 to 250: synthetic pressures from 90 to 157, epsilon 1.0
one patient of 180, bounds 0 to 300: synthetic pressures from 90 to 180, epsilon 1.0
one patient of 180, bounds 60 to 250: synthetic pressures from 90 to 180, epsilon 1.0
one patient of 213, bounds 0 to 300: synthetic pressures from 90 to 213, epsilon 1.0
one patient of 213, bounds 60 to 250: synthetic pressures from 90 to 213, epsilon 1.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import warnings

import numpy as np
import pandas as pd

warnings.simplefilter('ignore')
from dpart.engines import Independent

random = np.random.default_rng(0)
pressure = random.normal(120, 12, 999).clip(90, 160)
for label, last in (('nobody above 160', 130.0), ('one patient of 180', 180.0), ('one patient of 213', 213.0)):
    people = pd.DataFrame({'pressure': np.append(pressure, last), 'age': random.integers(20, 90, 1000).astype(float)})
    for bounds in ((0, 300), (60, 250)):
        np.random.seed(0)
        maker = Independent(epsilon=1.0, bounds={'pressure': {'min': bounds[0], 'max': bounds[1]}, 'age': {'min': 0, 'max': 120}})
        maker.fit(people)
        made = maker.sample(3000)
        print(f'{label}, bounds {bounds[0]} to {bounds[1]}: synthetic pressures from {made["pressure"].min():.0f} to {made["pressure"].max():.0f}, '
              f'epsilon {maker.epsilon:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

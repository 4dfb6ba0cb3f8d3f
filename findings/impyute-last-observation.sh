#!/usr/bin/env bash
# The last observation of impyute is the one of another measurement: a missing pulse becomes the temperature.
#
# Packages: impyute 0.0.8, numpy 1.23.5, scipy 1.10.1, scikit-learn 1.2.2, pandas 1.5.3.
# Behaviour: locf documents the value of one row before in the same column, and axis=0, the default, for rows that
#   are points in time. It transposes the table then and takes the row before, which is the column before of the
#   same time, and returns the transposed table. The first column is filled from a later time.
# Expected: as with axis=1, which is documented for the reverse: the value of the time before.
# Instead: pandas' ffill, or axis=1 for rows in time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5' 'scipy==1.10.1' 'scikit-learn==1.2.2' 'impyute==0.0.8' 'pandas==1.5.3'
cat > expected.txt <<'EXPECTED'
shape before (4, 3) after (3, 4)
impyute, default: pulse in hour 3 37.0, pressure in hour 4 80.0
impyute, axis=1: pulse in hour 3 75.0, pressure in hour 4 121.0
pandas: pulse in hour 3 75.0, pressure in hour 4 121.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from impyute.imputation.ts import locf

# one row for each hour: temperature, pulse, blood pressure
hours = np.array([[36.8, 72, 120], [36.9, 75, 118], [37.0, np.nan, 121], [37.1, 80, np.nan]], float)
filled = locf(hours)
print('shape before', hours.shape, 'after', filled.shape)
right = pd.DataFrame(hours).ffill().values
for name, seen in (('impyute, default', filled.T), ('impyute, axis=1', locf(hours, axis=1)), ('pandas', right)):
    print(f'{name}: pulse in hour 3 {seen[2, 1]:.1f}, pressure in hour 4 {seen[3, 2]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

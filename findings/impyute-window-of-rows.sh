#!/usr/bin/env bash
# The moving window of impyute ends at the column whose number is the number of rows: two patients with ten
# readings each keep their gaps, or are filled from the beginning of the recording.
#
# Packages: impyute 0.0.8, numpy 1.23.5, scipy 1.10.1, scikit-learn 1.2.2.
# Behaviour: the window runs along the row, and its end is limited by the length of the table, which counts rows.
#   Behind that column the right half of the window is missing, and soon the whole: the mean of nothing is
#   NaN. The documented example is a square, in which both lengths are equal.
# Expected: the mean of the two readings on each side, as with more rows than columns.
# Instead: append empty rows until the table is a square, or pandas' rolling.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5' 'scipy==1.10.1' 'scikit-learn==1.2.2' 'impyute==0.0.8'
cat > expected.txt <<'EXPECTED'
missing at 1, by hand 11.7: 2 rows 10.0 4 rows 11.7 6 rows 11.7 10 rows 11.7
missing at 4, by hand 14.0: 2 rows nan 4 rows 12.5 6 rows 13.3 10 rows 14.0
missing at 7, by hand 17.0: 2 rows nan 4 rows nan 6 rows 15.0 10 rows 17.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from impyute.imputation.ts import moving_window

readings = np.array([[10, 11, 12, 13, 14, 15, 16, 17, 18, 19]], float)
for place in (1, 4, 7):
    right = np.delete(readings[0, max(0, place - 2):place + 3], min(place, 2)).mean()
    print(f'missing at {place}, by hand {right:.1f}:', end='')
    for rows in (2, 4, 6, 10):
        data = np.repeat(readings, rows, axis=0)
        data[0, place] = np.nan
        print(f' {rows} rows {moving_window(data)[0, place]:.1f}', end='')
    print()
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Gini index of one column depends on the other columns in pygini, and the table is changed.
#
# Packages: pygini 1.0.1, numpy 2.4.6.
# Behaviour: with an axis, gini computes an index for each column. Where a value is negative, the
#   smallest value of the whole table is subtracted, also from columns without negative values: the
#   incomes of 2024 have an index of 0.25, and of 0.006 as soon as one household has a loss of 1000
#   in 2025. The subtraction is done in the array of the caller, whose incomes are 1000 higher after
#   the call.
# Expected: an index of 0.25 for 2024 in both cases, and an array that is as before.
# Instead: call gini for each column, with a copy of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pygini==1.0.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
2025 begins with 10: index of 2024 0.250, of this column alone 0.250; 2024 after the call [10, 20, 30, 40]
2025 begins with -1000: index of 2024 0.006, of this column alone 0.250; 2024 after the call [1010, 1020, 1030, 1040]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pygini import gini

for loss in (10.0, -1000.0):
    incomes = np.array([[10.0, loss], [20.0, 20.0], [30.0, 30.0], [40.0, 40.0]])  # columns 2024, 2025
    alone = gini(incomes[:, 0].copy())
    print(f'2025 begins with {loss:.0f}: index of 2024 {gini(incomes, axis=0)[0]:.3f}, of this column alone {alone:.3f};',
          f'2024 after the call {np.round(incomes[:, 0]).astype(int).tolist()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

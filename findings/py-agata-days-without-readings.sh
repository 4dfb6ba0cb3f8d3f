#!/usr/bin/env bash
# py-agata counts days without readings as days without excursions.
#
# Packages: py-agata 0.0.8, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1.
# Behaviour: mage_index, mage_plus_index and mage_minus_index ignore missing values, by their
#   documentation, and take the mean of the amplitudes of the days. A day without any reading has no
#   amplitude, which is replaced by 0 before the mean. A gap of two days in a recording of four
#   halves the index, and a last day that was begun but not measured lowers it; the mean and the
#   standard deviation of the same recording do not change.
# Expected: the mean over days with readings.
# Instead: leave the days without readings out, and call it for each day.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'py-agata==0.0.8' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
two days: MAGE 112.3, mean 140.0; highest minus lowest 120.0
two days, the second without readings: MAGE 56.1, mean 140.0; highest minus lowest 120.0
four days, two in the middle without readings: MAGE 56.1, mean 140.0; highest minus lowest 120.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import warnings

import numpy as np
import pandas as pd
from py_agata.variability import mage_index, mean_glucose

warnings.simplefilter('ignore')
day = 140 + 60 * np.sin(np.arange(288) * 2 * np.pi / 96 + 0.3)
missing = np.full(288, np.nan)
recordings = {
    'two days': [day, day], 'two days, the second without readings': [day, missing],
    'four days, two in the middle without readings': [day, missing, missing, day],
}
for name, days in recordings.items():
    values = np.concatenate(days)
    data = pd.DataFrame({'t': pd.date_range('2026-01-01', periods=len(values), freq='5min'), 'glucose': values})
    print(f'{name}: MAGE {mage_index(data):.1f}, mean {mean_glucose(data):.1f}; highest minus lowest {day.max() - day.min():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

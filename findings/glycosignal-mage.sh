#!/usr/bin/env bash
# The mean amplitude of glycaemic excursions of glycosignal is 0 where a peak is held for two readings,
# and a wiggle of 1 mg/dL in a rise removes the rise.
#
# Packages: glycosignal 0.2.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: a peak is one reading above both of its neighbours. Sensors report whole numbers, and two
#   equal readings at the top are no peak. Amplitudes are taken between neighbouring turning points, so
#   each wiggle divides the excursion in parts, of which those below one standard deviation are left
#   out.
# Expected: the same value for the same meals: 120 mg/dL up and down, three times a day.
# Why it matters here: a patient with large excursions gets 0, without a message or a missing value.
# Instead: smooth before, and drop turning points below one standard deviation before the amplitudes.
# Source: Service et al., Diabetes 19 (1970) 644, which the function names: excursions between a nadir
#   and a peak that exceed one standard deviation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'glycosignal==0.2.0' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
peak of one reading: MAGE 121, largest minus smallest 121, SD 40
peak of two readings: MAGE 0, largest minus smallest 121, SD 41
four wiggles of 1 mg/dL in each meal: MAGE 44, largest minus smallest 121, SD 40
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from glycosignal import metrics


def measure(name, glucose):
    readings = pd.DataFrame({
        'Timestamp': pd.date_range('2024-03-01', periods=len(glucose), freq='5min'),
        'Glucose': glucose.astype(float),
    })
    print(f'{name}: MAGE {metrics.mage(readings):.0f}, largest minus smallest',
          f'{readings.Glucose.max() - readings.Glucose.min():.0f}, SD {metrics.sd(readings):.0f}')


meal = np.concatenate([np.arange(90, 210, 5), np.arange(210, 90, -5), [90] * 16, [89]])
sharp = np.tile(meal, 6)
measure('peak of one reading', sharp)
measure('peak of two readings', np.tile(np.insert(meal, 24, 210), 6))
wiggle = sharp.copy()
for start in range(0, len(wiggle), len(meal)):
    wiggle[start + 8], wiggle[start + 16] = wiggle[start + 7] - 1, wiggle[start + 15] - 1
    wiggle[start + 32], wiggle[start + 40] = wiggle[start + 31] + 1, wiggle[start + 39] + 1
measure('four wiggles of 1 mg/dL in each meal', wiggle)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

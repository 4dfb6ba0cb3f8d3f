#!/usr/bin/env bash
# py-agata reports the time gained by a glucose prediction as its delay.
#
# Packages: py-agata 0.0.8, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1.
# Behaviour: time_delay is documented as the delay of a predicted trace in minutes, the shift at
#   which it fits the readings best. It returns ph minus that shift, what the literature calls the
#   time gain. A prediction that equals the readings has a delay of 30 minutes, one that is 30
#   minutes late a delay of 0, so that of two models the worse one is chosen.
# Expected: 0 for the perfect prediction, and the minutes it is late for the others.
# Instead: ph - time_delay(data, data_hat, ph).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'py-agata==0.0.8' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
a prediction that is 0 minutes late: 30 minutes, mean error 0 mg/dL
a prediction that is 10 minutes late: 20 minutes, mean error 6 mg/dL
a prediction that is 20 minutes late: 10 minutes, mean error 11 mg/dL
a prediction that is 30 minutes late: 0 minutes, mean error 17 mg/dL
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from py_agata.error import time_delay

times = pd.date_range('2026-01-01', periods=288, freq='5min')
minutes = np.arange(-60, 288 * 5, 5)
readings = 140 + 50 * np.sin(minutes / 75) + 20 * np.sin(minutes / 31)
data = pd.DataFrame({'t': times, 'glucose': readings[12:]})
for late in (0, 10, 20, 30):
    steps = late // 5
    predicted = pd.DataFrame({'t': times, 'glucose': readings[12 - steps:len(readings) - steps]})
    print(f'a prediction that is {late} minutes late: {time_delay(data, predicted, 30)} minutes,',
          f'mean error {np.mean(np.abs(predicted["glucose"] - data["glucose"])):.0f} mg/dL')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

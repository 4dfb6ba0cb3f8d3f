#!/usr/bin/env bash
# The average daily risk range of glycosignal is neither daily nor an average: it is the worst low and
# the worst high of the whole recording, and grows with its length.
#
# Packages: glycosignal 0.2.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: adrr adds the largest low risk and the largest high risk of all readings. One day of
#   fourteen with a low and a high sets the value: it is 81, and the days have 10 on average. More days
#   of a patient can only raise it.
# Expected: the mean over the days of each day's largest low and largest high risk. The module states
#   that its risk indices follow their published definitions.
# Why it matters here: below 20 is a low risk and 40 a high one; one bad day makes a recording high.
# Instead: group by the day, take adrr of each, and average, as below.
# Source: Kovatchev et al., Diabetes Care 29 (2006) 2433, "Evaluation of a new measure of blood glucose
#   variability in diabetes".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'glycosignal==0.2.0' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
published definitions: True
1 days: adrr 4.6, mean over the days 4.6
3 days: adrr 4.6, mean over the days 4.6
7 days: adrr 81.1, mean over the days 15.5
14 days: adrr 81.1, mean over the days 10.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from glycosignal import metrics

print('published definitions:', 'follow their published definitions' in metrics.__doc__)
times = pd.date_range('2024-03-01', periods=14 * 288, freq='5min')
glucose = 120 + 30 * np.sin(np.arange(len(times)) * 2 * np.pi / 288)
glucose[1800], glucose[1900] = 45, 380
readings = pd.DataFrame({'Timestamp': times, 'Glucose': glucose})
for days in (1, 3, 7, 14):
    part = readings.iloc[:days * 288]
    daily = [metrics.adrr(day) for _, day in part.groupby(part.Timestamp.dt.date)]
    print(f'{days} days: adrr {metrics.adrr(part):.1f}, mean over the days {np.mean(daily):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

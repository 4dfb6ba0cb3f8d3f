#!/usr/bin/env bash
# The cyclical features of feature-engine put 23 and 0 o'clock, and Sunday and Monday, on the same point of
# the circle, while the hours 22 and 23 are apart.
#
# Packages: feature-engine 1.9.4, pandas 2.3.3, numpy 2.4.6, scikit-learn 1.7.2.
# Behaviour: CyclicalFeatures divides by the largest value that it saw. Months from 1 to 12 are right. Hours
#   from 0 to 23 have a circle of 23 hours, on which the hour before midnight is the hour after it, and
#   days of the week from 0 to 6 one of six days. If nobody was admitted after 20 o'clock in the training
#   table, 20 is 0 o'clock.
# Expected: 24 and 7 points; the period of a column is not in its largest value where it begins at 0.
# Why it matters here: a model cannot tell a patient admitted on a Sunday from one admitted on a Monday.
# Instead: CyclicalFeatures(max_values={'hour': 24, 'weekday': 7, 'month': 12}).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'feature-engine==1.9.4' 'pandas==2.3.3' 'numpy==2.4.6' 'scikit-learn==1.7.2'
cat > expected.txt <<'EXPECTED'
default: hour 22 and 23 0.27 apart, hour 23 and 0 0.00 apart, weekday 5 and 6 1.00 apart, weekday 6 and 0 0.00 apart, month 11 and 12 0.52 apart, month 12 and 1 0.52 apart
periods given: hour 22 and 23 0.26 apart, hour 23 and 0 0.26 apart, weekday 5 and 6 0.87 apart, weekday 6 and 0 0.87 apart, month 11 and 12 0.52 apart, month 12 and 1 0.52 apart
fitted up to 20 o'clock: hour 20 and 0 0.00 apart
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from feature_engine.creation import CyclicalFeatures

number = np.arange(168)
times = pd.DataFrame({'hour': number % 24, 'weekday': number % 7, 'month': number % 12 + 1})
PERIODS = {'hour': 24, 'weekday': 7, 'month': 12}


def measure(encoder, table, column, first, second):
    points = encoder.transform(table).groupby(table[column])[[f'{column}_sin', f'{column}_cos']].first()
    return np.linalg.norm(points.loc[first] - points.loc[second])


for name, encoder in (('default', CyclicalFeatures()),
                      ('periods given', CyclicalFeatures(max_values=PERIODS))):
    encoder.fit(times)
    print(name + ':', ', '.join(
        f'{column} {first} and {second} {measure(encoder, times, column, first, second):.2f} apart'
        for column, first, second in (('hour', 22, 23), ('hour', 23, 0), ('weekday', 5, 6), ('weekday', 6, 0),
                                      ('month', 11, 12), ('month', 12, 1))))
day = times[times.hour <= 20]
encoder = CyclicalFeatures().fit(day)
print('fitted up to 20 o\'clock: hour 20 and 0', f'{measure(encoder, day, "hour", 20, 0):.2f} apart')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

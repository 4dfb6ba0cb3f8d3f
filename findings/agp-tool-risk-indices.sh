#!/usr/bin/env bash
# agp-tool's low blood glucose index does not fall where low readings become rarer, and its daily range
# of risk leaves out the highs or the lows of a day with both.
#
# Packages: agp-tool 0.1.0.7, numpy 2.4.6, pandas 3.1.1.
# Behaviour: LBGI and HBGI are means over the low or high readings only; their definition (Kovatchev)
#   takes the mean over all readings, with 0 for the others. One reading of 50 mg/dL in three days
#   thus looks like constant hypoglycaemia. ADRR takes the largest less the smallest risk of a day;
#   its definition adds the largest low risk to the largest high risk. GRADE takes natural
#   logarithms of glucose / 1.794 where its definition (Hill) takes log10(log10(glucose)) + 0.16.
# Expected: the published indices, to whose thresholds (an LBGI above 5 is a high risk) they are held.
# Instead: compute the indices from the readings, as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'agp-tool==0.1.0.7' 'numpy==2.4.6' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
120 mg/dL, once 50, lbgi: 22.5, by definition 0.0
120 mg/dL, once 50, hbgi: 0.1, by definition 0.1
120 mg/dL, once 50, adrr: 7.5, by definition 7.6
120 mg/dL, once 50, grade: 31.3, by definition 2.4
120 mg/dL, at times 50 or 300, lbgi: 22.5, by definition 0.5
120 mg/dL, at times 50 or 300, hbgi: 0.9, by definition 0.8
120 mg/dL, at times 50 or 300, adrr: 33.8, by definition 56.5
120 mg/dL, at times 50 or 300, grade: 32.1, by definition 3.2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from agp import ReportGenerator

times = pd.date_range('2026-01-01', periods=3 * 288, freq='5min')


def compare(name, glucose):
    table = pd.DataFrame({'Time': times, 'Sensor Reading(mg/dL)': glucose})
    table.to_csv('readings.csv', index=False)
    seen = ReportGenerator('readings.csv').metrics
    scale = 1.509 * (np.log(glucose) ** 1.084 - 5.381)
    low, high = 10 * np.minimum(scale, 0) ** 2, 10 * np.maximum(scale, 0) ** 2
    days = [risk.reshape(3, 288).max(axis=1) for risk in (low, high)]
    grade = 425 * (np.log10(np.log10(glucose / 18.018)) + 0.16) ** 2
    defined = {
        'lbgi': low.mean(),
        'hbgi': high.mean(),
        'adrr': np.mean(days[0] + days[1]),
        'grade': np.minimum(grade, 50).mean(),
    }
    for index, value in defined.items():
        print(f'{name}, {index}: {seen[index]:.1f}, by definition {value:.1f}')


steady = np.full(3 * 288, 120.0)
steady[100] = 50
compare('120 mg/dL, once 50', steady)
swinging = np.full(3 * 288, 120.0)
swinging[::48] = 50
swinging[24::48] = 300
compare('120 mg/dL, at times 50 or 300', swinging)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

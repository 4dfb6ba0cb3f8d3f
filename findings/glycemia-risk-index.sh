#!/usr/bin/env bash
# Three packages for glucose readings compute other glycaemia risk indices than the published one.
#
# Packages: diametrics 0.4.3, glucostats 1.0.0, glycosignal 0.2.0, pandas 2.3.3, numpy 2.2.6.
# Behaviour: the index is 3.0 × the percentage of time below 54 mg/dL + 2.4 × from 54 to 69 + 1.6 ×
#   above 250 + 0.8 × from 181 to 250, at most 100. diametrics has the weights 0.5, 0.2, 0.5 and
#   0.2, so its largest value is 50. glucostats exchanges the weights of high and very high, so a
#   day at 300 mg/dL has half of the index of one at 200. glycosignal adds the lowest readings to
#   the low ones and the highest to the high ones, so they count twice.
# Expected: one index; iglu-python and R's iglu have the published one.
# Why it matters here: the index is an outcome and a feature, and no two of these can be pooled.
# Instead: the four percentages and the formula by hand.
# Source: Klonoff and others, A glycemia risk index, Journal of Diabetes Science and Technology
#   2022, doi:10.1177/19322968221085273.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'tqdm==4.70.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'diametrics==0.4.3' 'glucostats==1.0.0' 'glycosignal==0.2.0'
cat > expected.txt <<'EXPECTED'
a quarter of the day at 50 mg/dL: published 75; diametrics 12, glucostats 75, glycosignal 100
a quarter of the day at 65 mg/dL: published 60; diametrics 5, glucostats 60, glycosignal 60
a quarter of the day at 200 mg/dL: published 20; diametrics 5, glucostats 40, glycosignal 20
a quarter of the day at 300 mg/dL: published 40; diametrics 12, glucostats 20, glycosignal 60
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from diametrics.metrics import glycemic_risk_index
from glucostats.stats.risks_stats import glycemia_risk
from glycosignal.metrics import gri as glycosignal_gri


def readings(value):  # 288 readings of a day, 72 of them at this value, the others at 120 mg/dL
    times = pd.date_range('2026-03-15', periods=288, freq='5min')
    return pd.DataFrame({'time': times, 'glucose': np.where(np.arange(288) % 4 == 1, value, 120.0)})


for value, published in ((50, 75), (65, 60), (200, 20), (300, 40)):
    day = readings(value)
    two = pd.concat([day, day]).set_index(pd.Index(['a'] * 288 + ['b'] * 288))
    scores = {
        'diametrics': glycemic_risk_index(day.rename(columns={'glucose': 'glc'}), 'mg')['gri'].iloc[0],
        'glucostats': glycemia_risk(two)['gri'].loc['a'],
        'glycosignal': glycosignal_gri(day.rename(columns={'time': 'Timestamp', 'glucose': 'Glucose'})),
    }
    print(f'a quarter of the day at {value} mg/dL: published {published};',
          ', '.join(f'{name} {score:.0f}' for name, score in scores.items()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# glucostats gives glucose readings to other patients where the rows are sorted by time.
#
# Packages: glucostats 1.0.0, pandas 2.2.3, numpy 2.2.3, scipy 1.15.2, neurokit2 0.2.10.
# Behaviour: the functions compute a column for each patient, concatenate the columns patient by
#   patient and assign the values without their index. Where the rows of two patients alternate, as
#   after sort_values by time or from a database, each patient has ranges, times and differences of
#   others beside their own glucose, and nobody is told. A table of one patient raises a ValueError
#   instead, since pandas then returns one row.
# Expected: the statistics of a patient do not depend on the order of the patients, nor on there
#   being others. The patient is the index, by which the readings can be told apart.
# Why it matters here: time in range is the result of trials, and a label for training.
# Instead: sort by patient, then by time (a stable sort of the index), before each call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.3' 'scipy==1.15.2' 'neurokit2==0.2.10' 'tqdm==4.67.1' 'colorlog==4.6.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'glucostats==1.0.0'
cat > expected.txt <<'EXPECTED'
by patient, Anna: above 180 mg/dL 0 %, of the readings 0 %; sum of differences 0, by its definition 0
by patient, Ben: above 180 mg/dL 50 %, of the readings 50 %; sum of differences 130, by its definition 130
by time, Anna: above 180 mg/dL 25 %, of the readings 0 %; sum of differences 130, by its definition 0
by time, Ben: above 180 mg/dL 25 %, of the readings 50 %; sum of differences 0, by its definition 130
Anna alone: Length of values (1) does not match length of index (288)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from glucostats.stats.time_stats import percentage_time_in_ranges
from glucostats.stats.variability_stats import glucose_variability

time = pd.date_range('2026-03-01', periods=288, freq='5min')
half = np.arange(288) < 144
anna = pd.DataFrame({'time': time, 'glucose': 120.0}, index=['Anna'] * 288)
ben = pd.DataFrame({'time': time, 'glucose': np.where(half, 250.0, 120.0)}, index=['Ben'] * 288)
by_patient = pd.concat([anna, ben])
for title, table in (('by patient', by_patient), ('by time', by_patient.sort_values('time', kind='stable'))):
    ranges, variability = percentage_time_in_ranges(table), glucose_variability(table)
    for name in ('Anna', 'Ben'):
        glucose = table.loc[name, 'glucose']
        print(f'{title}, {name}: above 180 mg/dL {ranges.loc[name, "pt_ar"]:.0f} %, of the readings',
              f'{100 * (glucose > 180).mean():.0f} %; sum of differences',
              f'{variability.loc[name, "dt"]:.0f}, by its definition {glucose.diff().abs().sum():.0f}')
try:
    print(percentage_time_in_ranges(anna))
except ValueError as error:
    print('Anna alone:', error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

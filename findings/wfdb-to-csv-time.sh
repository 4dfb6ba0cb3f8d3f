#!/usr/bin/env bash
# wfdb-to-csv gives an ECG without a date the time of its conversion, and drops the time that it has.
#
# Packages: wfdb-to-csv 0.1.1, wfdb 4.3.0, pandas 2.2.3, numpy 2.2.6, tqdm 4.67.1.
# Behaviour: a WFDB header may have a time of day and no date, as some records of PhysioNet do, since
#   dates were removed to protect the patients. The converter then takes the present time as the
#   start, and writes it into the table and its metadata as if it were the one of the recording. Two
#   conversions of one file differ.
# Expected: 10:15:30, on any day, or no time; and the same output for the same file.
# Why it matters here: the hour is what is left of the date, and a sleep or a dose refers to it.
# Instead: wfdb.rdheader(record).base_time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'wfdb==4.3.0' 'pandas==2.2.3' 'numpy==2.2.6' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'wfdb-to-csv==0.1.1'
cat > expected.txt <<'EXPECTED'
with a date: header 10:15:30, table starts at this time of day: True ; at the time of the conversion: False
without a date: header 10:15:30, table starts at this time of day: False ; at the time of the conversion: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime
import time

import numpy as np
import pandas as pd
import wfdb
from wfdb_to_csv import wfdb_to_csv

date = datetime.date(2026, 3, 2)
for title, day in (('with a date', date), ('without a date', None)):
    wfdb.wrsamp('record', 250, ['mV'], ['II'], np.zeros((10, 1)), fmt=['16'], adc_gain=[200.0], baseline=[0],
                base_time=datetime.time(10, 15, 30), base_date=day)
    wfdb_to_csv('record.hea', verbose=False)
    start = pd.read_csv('record.csv')['time'].iloc[0] / 1e9
    seen = datetime.datetime.fromtimestamp(start).time()
    print(f'{title}: header {wfdb.rdheader("record").base_time}, table starts at this time of day:',
          seen == datetime.time(10, 15, 30), '; at the time of the conversion:', abs(time.time() - start) < 600)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

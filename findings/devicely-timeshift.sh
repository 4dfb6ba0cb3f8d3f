#!/usr/bin/env bash
# devicely's shift of dates leaves true dates in the recordings that it is meant to de-identify.
#
# Packages: devicely 1.1.1, pandas 1.5.3 (it does not write with newer ones), pyedflib 0.1.42, numpy
#   1.26.4.
# Behaviour: timeshift() moves all times of a recording by a time that is drawn or given. For an
#   Empatica E4 the intervals between beats stay at their true times. Written, each of them has the
#   shift added to its second: start plus second is the true time. A shift to a date moves the marks
#   of the patient so that the first of them is the start. For a Faros recording a shift by a time
#   leaves start_time, which is what is written: the copy has the true date, and read again it is
#   not shifted at all.
# Expected: all times moved by one shift, as the documentation says.
# Why it matters here: the package is made for sharing recordings, and the shift is the
#   de-identification.
# Instead: shift IBI.index and start_time yourself, and read what was written.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==1.5.3' 'numpy==1.26.4' 'pyedflib==0.1.42'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'devicely==1.1.1'
cat > expected.txt <<'EXPECTED'
Empatica, shifted by a year: heart rate 2025-01-01 08:00:00 beats 2026-01-01 08:00:02.500000
written: start 1735718400.0, first beat 31536002.5,0.8
Empatica, shifted to 2020: start 2020-01-01 00:00:00 mark of second 7 2020-01-01 00:00:00
Faros, shifted by a year: electrocardiogram 2025-01-01 08:00:00
written and read again: 2026-01-01 08:00:00 in meta.json: 2026-01-01 08:00:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime
import json
from pathlib import Path

import devicely
import numpy as np
import pandas as pd
import pyedflib

start, year = pd.Timestamp('2026-01-01 08:00'), pd.Timedelta('-365 days')
folder = Path('empatica')
folder.mkdir()
second = start.timestamp()
for name in ('BVP', 'EDA', 'HR', 'TEMP'):
    folder.joinpath(f'{name}.csv').write_text(f'{second}\n1.0\n' + '1.0\n' * 10)
folder.joinpath('ACC.csv').write_text(f'{second}, {second}, {second}\n1.0, 1.0, 1.0\n' + '1,2,3\n' * 10)
folder.joinpath('IBI.csv').write_text(f'{second}, IBI\n2.5,0.8\n3.3,0.8\n')
folder.joinpath('tags.csv').write_text(f'{second + 7}\n')
reader = devicely.EmpaticaReader(folder)
reader.timeshift(year)
print('Empatica, shifted by a year: heart rate', reader.HR.index[0], 'beats', reader.IBI.index[0])
reader.write('written')
first, beat = Path('written/IBI.csv').read_text().split()[0::2]
print('written: start', first, 'first beat', beat)
reader = devicely.EmpaticaReader(folder)
reader.timeshift(pd.Timestamp('2020-01-01'))
print('Empatica, shifted to 2020: start', reader.HR.index[0], 'mark of second 7', reader.tags[0])

signals = {'ECG': 100, 'X': 10, 'Y': 10, 'Z': 10, 'Marker': 1, 'HRV': 5}
writer = pyedflib.EdfWriter('faros.edf', len(signals), file_type=pyedflib.FILETYPE_EDF)
writer.setStartdatetime(datetime.datetime(2026, 1, 1, 8))
for number, (label, rate) in enumerate(signals.items()):
    writer.setSignalHeader(number, {
        'label': label, 'dimension': 'uV', 'sample_frequency': rate, 'physical_max': 1000,
        'physical_min': -1000, 'digital_max': 32767, 'digital_min': -32768, 'transducer': '', 'prefilter': ''})
writer.writeSamples([np.zeros(5 * rate) for rate in signals.values()])
writer.close()
reader = devicely.FarosReader('faros.edf')
reader.timeshift(year)
print('Faros, shifted by a year: electrocardiogram', reader.ECG.index[0])
reader.write('faros')
print('written and read again:', devicely.FarosReader('faros').ECG.index[0],
      'in meta.json:', json.loads(Path('faros/meta.json').read_text())['start_time'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

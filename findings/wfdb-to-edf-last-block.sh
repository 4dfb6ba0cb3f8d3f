#!/usr/bin/env bash
# wfdb's conversion to EDF mixes the signals of the last block, and loses the start of the recording.
#
# Packages: wfdb 4.3.1, pyedflib 0.1.42 (reads the file), numpy 2.4.6.
# Behaviour: wfdb_to_edf writes blocks of 10 seconds. Of 8 seconds with 1 mV in lead I and 2 mV in
#   lead II, lead I comes back with 10 seconds of 1 mV, and lead II with 6 seconds of 2 mV and 4 of
#   the lowest value: the samples of a block that is not full are laid out by the shorter length. A
#   recording of exactly 10 seconds gets a second block of the lowest value. The date and time of
#   the record become 1 January 1985. No error, no warning.
# Expected: each sample in its own lead, padding behind it, and the start of the record.
# Instead: read the record with wfdb.rdrecord, and write it with pyedflib or edfio.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'wfdb==4.3.1' 'pyedflib==0.1.42' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
8 s: start 1985-01-01 00:00:00
  I at 1 mV for 10 s, at 2 mV for 0 s, at the lowest value for 0 s
  II at 1 mV for 0 s, at 2 mV for 6 s, at the lowest value for 4 s
10 s: start 1985-01-01 00:00:00
  I at 1 mV for 10 s, at 2 mV for 0 s, at the lowest value for 10 s
  II at 1 mV for 0 s, at 2 mV for 10 s, at the lowest value for 10 s
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import datetime
import io

import numpy as np
import pyedflib
import wfdb
from wfdb.io.convert.edf import wfdb_to_edf

for seconds in (8, 10):
    leads = np.tile([1.0, 2.0], (250 * seconds, 1))
    leads[0] = 0.0  # so that no lead is constant
    wfdb.wrsamp(
        'visit', fs=250, units=['mV', 'mV'], sig_name=['I', 'II'], p_signal=leads, fmt=['16', '16'],
        base_date=datetime.date(2024, 1, 2), base_time=datetime.time(3, 4, 5),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        wfdb_to_edf('visit')
    with pyedflib.EdfReader('visit.edf') as reader:
        print(f'{seconds} s: start {reader.getStartdatetime()}')
        for number, name in enumerate(('I', 'II')):
            lead = reader.readSignal(number)
            times = [round((abs(lead - value) < 0.01).sum() / 250) for value in (1, 2)]
            low = round((lead < -1).sum() / 250)
            print(f'  {name} at 1 mV for {times[0]} s, at 2 mV for {times[1]} s, '
                  f'at the lowest value for {low} s')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

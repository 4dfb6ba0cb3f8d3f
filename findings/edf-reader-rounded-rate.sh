#!/usr/bin/env bash
# edf-reader rounds the sampling rate to a whole number and computes the end of a recording with
# it.
#
# Packages: edf-reader 0.1.3, edfio 0.4.14 (writes the files), numpy 2.3.3.
# Behaviour: read_ts_channel_basic_info gives a rate of 12.5 Hz as 12 and of 1.5 Hz as 2, and
#   divides the number of samples by it: of a recording of 600 s one channel lasts 625 s, another
#   one 450 s.
# Expected: the rate of the header, number of samples by duration of a record, which
#   get_sampling_frequency of the same reader returns, and an end at 600 s for all channels.
# Instead: get_sampling_frequency, and nsamp divided by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.3.3' 'edfio==0.4.14' 'edf-reader==0.1.3'
cat > expected.txt <<'EXPECTED'
100 Hz: rate 100, 60000 samples in 600 s, by get_sampling_frequency 100.0
12.5 Hz: rate 12, 7500 samples in 625 s, by get_sampling_frequency 12.5
1.5 Hz: rate 2, 900 samples in 450 s, by get_sampling_frequency 1.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import numpy as np
from edf_reader import EdfWrapper
from edfio import Edf, EdfSignal

signals = [EdfSignal(np.sin(np.arange(int(600 * rate))), rate, label=f'{rate} Hz', physical_range=(-1, 1))
           for rate in (100, 12.5, 1.5)]
Edf(signals, starttime=datetime.time(22, 0), data_record_duration=10).write('night.edf')
reader = EdfWrapper('night.edf')
for place, channel in enumerate(reader.read_ts_channel_basic_info()):
    seconds = (channel['end_time'] - channel['start_time']) / 1e6
    print(f"{channel['name']}: rate {channel['fsamp']}, {channel['nsamp']} samples in {seconds:.0f} s, "
          f"by get_sampling_frequency {reader.get_sampling_frequency(place)}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# heartpy's SDSD is the standard deviation of absolute differences, about half of the one that is
# defined.
#
# Packages: heartpy 1.2.7, neurokit2 0.2.12, numpy 1.26.4, scipy 1.12.0, pandas 2.3.3.
# Behaviour: SDSD is the standard deviation of the differences between successive intervals.
#   heartpy stores absolute differences, and takes their standard deviation. Its RMSSD, whose
#   squares hide the sign, is right, so the two numbers, which agree for a record without a trend,
#   differ by a factor. A heart that alternates between two intervals has an SDSD of 0.
# Expected: the definition, as in neurokit2.
# Instead: numpy.diff(intervals).std(ddof=1).
# Source: Task Force (1996), "Heart rate variability", Circulation 93, table 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'heartpy==1.2.7' 'neurokit2==0.2.12' 'numpy==1.26.4' 'scipy==1.12.0' 'pandas==2.3.3' 'setuptools==68.2.2'
cat > expected.txt <<'EXPECTED'
random: heartpy SDSD 34.1, RMSSD 56.8; defined SDSD 56.9, neurokit2 56.9
breathing: heartpy SDSD 0.0, RMSSD 50.0; defined SDSD 50.1, neurokit2 50.1
alternating 980 and 1020 ms: heartpy SDSD 0.0, RMSSD 40.0; defined SDSD 40.1, neurokit2 40.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import heartpy
import neurokit2
import numpy as np

random = np.random.default_rng(0)
records = {
    'random': 1000 + random.normal(0, 40, size=300),
    'breathing': 1000 + 50 * np.sin(2 * np.pi * 0.25 * np.arange(300)),
    'alternating 980 and 1020 ms': np.tile([980.0, 1020.0], 150),
}
for name, intervals in records.items():
    beats = np.cumsum(np.r_[0, np.round(intervals)]).astype(int)
    # a signal with one narrow peak for each beat, sampled at 1000 Hz
    times = np.arange(beats[-1] + 600)
    signal = np.zeros(len(times))
    for beat in beats + 300:
        signal[beat - 40:beat + 41] = 1000 * np.hanning(81)
    working, measures = heartpy.process(signal, 1000.0)
    kept = np.array(working['RR_list'])[np.array(working['RR_masklist']) == 0]
    defined = np.diff(kept).std(ddof=1)
    other = neurokit2.hrv_time(beats, sampling_rate=1000)['HRV_SDSD'].iloc[0]
    print(f'{name}: heartpy SDSD {measures["sdsd"]:.1f}, RMSSD {measures["rmssd"]:.1f};',
          f'defined SDSD {defined:.1f}, neurokit2 {other:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

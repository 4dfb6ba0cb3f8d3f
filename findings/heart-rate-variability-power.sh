#!/usr/bin/env bash
# neurokit2 and heartpy return the power of heart rate variability in units that are not ms²:
# doubling the variability leaves neurokit2's number as it was.
#
# Packages: neurokit2 0.2.12, heartpy 1.2.7, numpy 1.26.4, scipy 1.12.0, pandas 2.3.3.
# Behaviour: intervals that swing by A ms have A²/2 ms² of power in their band. hrv_frequency of
#   neurokit2 divides the spectrum by its maximum before it integrates (normalize=True), so LF and
#   HF are about 0.01 and cannot be compared between people or visits; the columns are called
#   HRV_LF and HRV_HF as in tables of ms². heartpy gives ms² with its welch and periodogram
#   methods, and with its fft method a number that is neither ms² nor the sum of the same spectrum
#   in ms².
# Expected: ms² (the standard of 1996), whatever the method; a name of its own for a share.
# Instead: hrv_frequency(..., normalize=False), and heartpy's welch method.
# Source: Task Force (1996), "Heart rate variability", Circulation 93, table 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'neurokit2==0.2.12' 'heartpy==1.2.7' 'numpy==1.26.4' 'scipy==1.12.0' 'pandas==2.3.3' 'setuptools==68.2.2'
cat > expected.txt <<'EXPECTED'
swing 20 ms, 200 ms2: neurokit2 0.010, normalize=False 201
  heartpy welch: 196.55
  heartpy periodogram: 197.32
  heartpy fft: 0.33
swing 40 ms, 800 ms2: neurokit2 0.010, normalize=False 799
  heartpy welch: 778.04
  heartpy periodogram: 783.92
  heartpy fft: 1.31
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import neurokit2
import numpy as np
from heartpy.analysis import calc_fd_measures


def record(swing):
    """Intervals in ms for five minutes: a mean of one second, and a swing at 0.1 Hz."""
    time, intervals = 0.0, []
    while time < 300:
        intervals.append(round(1000 + swing * np.sin(2 * np.pi * 0.1 * time)))
        time += intervals[-1] / 1000
    return np.array(intervals, dtype=float)


for swing in (20, 40):
    intervals = record(swing)
    beats = np.cumsum(np.r_[0, intervals]).astype(int)
    plain = neurokit2.hrv_frequency(beats, sampling_rate=1000)['HRV_LF'].iloc[0]
    power = neurokit2.hrv_frequency(beats, sampling_rate=1000, normalize=False)['HRV_LF'].iloc[0]
    print(f'swing {swing} ms, {swing**2 / 2:.0f} ms2: neurokit2 {plain:.3f},',
          f'normalize=False {power:.0f}')
    working = {'RR_list_cor': intervals, 'RR_list': intervals}
    for method in ('welch', 'periodogram', 'fft'):
        _, measures = calc_fd_measures(method=method, measures={}, working_data=dict(working))
        print(f'  heartpy {method}: {measures["lf"]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

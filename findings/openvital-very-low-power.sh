#!/usr/bin/env bash
# The very low frequency power of openvital is the mean interval of the heart: 68,000 ms² for a steady one.
#
# Packages: openvital 0.2.1, openecg 0.11.0, opendsp 0.1.0, numpy 2.2.6, scipy 1.15.3.
# Behaviour: the filter for heart rate variability multiplies the intervals by a Hamming window with
#   their mean in them. The mean, 800 ms, leaks into the lowest frequency of a window of five minutes,
#   which counts as VLF, and from there into the total power. The window also takes 60 % of the
#   power of each other band, which is not given back.
# Expected: 0 for intervals that do not vary, and 450 ms² for a swing of 30 ms.
# Why it matters here: VLF and total power then say how fast the heart is.
# Instead: scipy.signal.periodogram of the intervals minus their mean, with the same window.
# Source: Task Force, Heart rate variability: standards of measurement, 1996, which it cites.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'openvital==0.2.1' 'openecg==0.11.0' 'opendsp==0.1.0'
cat > expected.txt <<'EXPECTED'
steady, 75 beats a minute: VLF 68000, by scipy 0, LF 0, by scipy 0, HF 0, by scipy 0
steady, 60 beats a minute: VLF 110000, by scipy 0, LF 0, by scipy 0, HF 0, by scipy 0
swing of 30 ms at 0.1 Hz: VLF 68000, by scipy 0, LF 170, by scipy 430, HF 0, by scipy 0
swing of 30 ms at 0.25 Hz: VLF 68000, by scipy 0, LF 0, by scipy 0, HF 140, by scipy 340
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from openvital.filters import ecg_hrv
from scipy.signal import periodogram

rate, seconds = 250, 300
names = [output['name'] for output in ecg_hrv.cfg['outputs']]
for title, mean, swing, frequency in (('steady, 75 beats a minute', 800, 0, 0.1), ('steady, 60 beats a minute', 1000, 0, 0.1),
                                      ('swing of 30 ms at 0.1 Hz', 800, 30, 0.1), ('swing of 30 ms at 0.25 Hz', 800, 30, 0.25)):
    beats, time = [], 0.5
    while time < seconds - 0.5:
        beats.append(time)
        time += (mean + swing * np.sin(2 * np.pi * frequency * time)) / 1000
    moments = np.arange(seconds * rate) / rate
    ecg = sum(np.exp(-0.5 * ((moments - beat) / 0.012) ** 2) for beat in beats)
    seen = dict(zip(names, ecg_hrv.run({'ECG': {'vals': ecg, 'srate': rate}}, {}, ecg_hrv.cfg)))
    intervals = np.interp(np.arange(seconds * 4) / 4, beats[1:], np.diff(beats) * 1000)
    f, power = periodogram(intervals, 4, 'hamming')
    right = [power[(f >= low) & (f < high)].sum() * f[1] for low, high in ((0.0033, 0.04), (0.04, 0.15), (0.15, 0.4))]
    shown = [(name, seen[name][0]['val'], value) for name, value in zip(('VLF', 'LF', 'HF'), right)]
    print(f'{title}:', ', '.join(f'{name} {float(f"{one:.2g}"):.0f}, by scipy {float(f"{two:.2g}"):.0f}' for name, one, two in shown))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

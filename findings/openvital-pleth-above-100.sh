#!/usr/bin/env bash
# The surgical pleth index of openvital takes the highest pulses for the lowest where they are above 100.
#
# Packages: openvital 0.2.1, openecg 0.11.0, opendsp 0.1.0, numpy 2.2.6, scipy 1.15.3.
# Behaviour: the index compares each pulse with the ones before it, in a histogram from 0 to 100. For a
#   height above 100 the histogram returns the count of its last class in place of its number. Monitors
#   that give the waveform in other units have heights of hundreds: each pulse then has the percentile
#   0, and the index does not fall where the pulses grow.
# Expected: the percentile of the last class, so that the index is the same in each unit, but for its
#   other part; a patient without pain, whose pulses grow, has a lower index.
# Why it matters here: opioids are dosed by it.
# Instead: scale the waveform to 0 to 100 first, and make new histograms for each patient.
# Source: Huiku et al., Assessment of surgical stress during general anaesthesia, 2007, which it cites.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'openvital==0.2.1' 'openecg==0.11.0' 'opendsp==0.1.0'
cat > expected.txt <<'EXPECTED'
pulses from 10 to 30: at the end height 29, percentile 100, index 22
pulses from 30 to 90: at the end height 86, percentile 100, index 22
pulses from 60 to 180: at the end height 172, percentile 30, index 71
pulses from 300 to 900: at the end height 860, percentile 30, index 71
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from openvital.filters import pleth_spi

rate = 100
time = np.arange(120 * rate) / rate
growth = 1 + time / 60  # the pulses treble in two minutes
wave = growth * (1 - np.cos(2 * np.pi * 1.25 * time)) / 2
for height in (10, 30, 60, 300):
    pleth_spi.hist_ppga, pleth_spi.hist_hbi = pleth_spi.Histogram(0, 100, 1000), pleth_spi.Histogram(240, 2000, 1000)
    names = [output['name'] for output in pleth_spi.cfg['outputs']]
    result = pleth_spi.run({'PLETH': {'vals': height * wave, 'srate': rate}}, {}, pleth_spi.cfg)
    seen = {name: np.mean([one['val'] for one in values[-20:]]) for name, values in zip(names, result)}
    print(f'pulses from {height} to {3 * height}: at the end height {seen["PPGA"]:.0f},',
          f'percentile {seen["PPGA_PERC"]:.0f}, index {seen["SPI"]:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

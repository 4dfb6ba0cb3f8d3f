#!/usr/bin/env bash
# The periodogram estimate of hurst-estimators halves the distance from 0.5, and gives the lowest
# frequency the mean of the series.
#
# Packages: hurst-estimators 0.0.3, numpy 2.4.6, scipy 1.17.1, PyWavelets 1.9.0.
# Behaviour: periodogram_estimator fits the logarithm of the power to the logarithm of 4 sin^2, a
#   squared frequency, whose slope is 0.5 - H. It computes H as if it were the frequency, with
#   half of the slope: noise with H = 0.9 is estimated at 0.67 to 0.75. It also takes the powers
#   from frequency 0 and the frequencies from 1, so the lowest frequency has the square of the
#   sum: a large power where a constant was added, and 0, with a logarithm near -60, where the
#   mean was subtracted. White noise has 0.43 or 0.51 by that.
# Expected: 0.5 less the slope, from powers 1 to m and frequencies 1 to m; then a constant changes
#   nothing.
# Instead: numpy.abs(numpy.fft.rfft(x))[1:m + 1] ** 2 with these frequencies, as in this script.
# Source: Geweke and Porter-Hudak, The Estimation and Application of Long Memory Time Series
#   Models, Journal of Time Series Analysis 1983, where the slope is -d and d = H - 0.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'PyWavelets==1.9.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hurst-estimators==0.0.3'
cat > expected.txt <<'EXPECTED'
H = 0.3, mean subtracted: 0.30; frequencies from 1 up to n^0.6 by hand 0.31
H = 0.3, 5 added: 0.38; frequencies from 1 up to n^0.6 by hand 0.31
H = 0.5, mean subtracted: 0.43; frequencies from 1 up to n^0.6 by hand 0.50
H = 0.5, 5 added: 0.51; frequencies from 1 up to n^0.6 by hand 0.50
H = 0.9, mean subtracted: 0.67; frequencies from 1 up to n^0.6 by hand 0.91
H = 0.9, 5 added: 0.75; frequencies from 1 up to n^0.6 by hand 0.91
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hurst_estimators import periodogram_estimator

def noise(length, hurst, random):
    k = np.arange(length + 1.0)
    r = 0.5 * (abs(k - 1) ** (2 * hurst) - 2 * k ** (2 * hurst) + (k + 1) ** (2 * hurst))
    spectrum = np.fft.fft(np.concatenate([r, r[-2:0:-1]])).real.clip(0)
    z = random.normal(size=2 * length) + 1j * random.normal(size=2 * length)
    return np.fft.fft(np.sqrt(spectrum / (2 * length)) * z).real[:length]

def by_hand(series):
    count = int(len(series) ** 0.6)
    power = np.abs(np.fft.rfft(series))[1:count + 1] ** 2
    frequency = 4 * np.sin(np.arange(1, count + 1) * np.pi / len(series)) ** 2
    return 0.5 - np.polyfit(np.log(frequency), np.log(power), 1)[0]

random = np.random.default_rng(0)
for hurst in (0.3, 0.5, 0.9):
    series = [noise(4096, hurst, random) for _ in range(20)]
    for name, change in (('mean subtracted', lambda v: v - v.mean()), ('5 added', lambda v: v + 5)):
        seen = np.mean([periodogram_estimator(change(values))[0] for values in series])
        right = np.mean([by_hand(change(values)) for values in series])
        print(f'H = {hurst}, {name}: {seen:.2f}; frequencies from 1 up to n^0.6 by hand {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The wavelet estimates of hurst-estimators mix natural logarithms with scales of 2, and take the
# mean of the series for a scale.
#
# Packages: hurst-estimators 0.0.3, numpy 2.4.6, scipy 1.17.1, PyWavelets 1.9.0.
# Behaviour: wavelet_estimator fits the natural logarithm of the coefficients to the number of the
#   level, each of which doubles the scale, so its slope is 0.69 of the right one: noise with H =
#   0.9 is estimated at 0.77 and with H = 0.3 at 0.34. The first value is the mean of the series
#   and not a detail, so a constant that is added changes the result. The other method, 'vvl',
#   takes the variance of levels that have one coefficient, which is 0, and returns NaN.
# Expected: logarithms to the base 2 of the details, by which H is found with an error of 0.01
#   here.
# Instead: the estimate by hand in this script, or dfa_estimator of the same package.
# Source: Simonsen, Hansen and Nes, Determination of the Hurst exponent by use of wavelet
#   transforms, Physical Review E 1998, equation 17.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'PyWavelets==1.9.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hurst-estimators==0.0.3'
cat > expected.txt <<'EXPECTED'
H = 0.3: awc 0.34, with 5 added 0.58, vvl nan; by hand 0.30
H = 0.5: awc 0.47, with 5 added 0.66, vvl nan; by hand 0.50
H = 0.9: awc 0.77, with 5 added 0.86, vvl nan; by hand 0.89
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pywt
from hurst_estimators import wavelet_estimator

def noise(length, hurst, random):
    k = np.arange(length + 1.0)
    r = 0.5 * (abs(k - 1) ** (2 * hurst) - 2 * k ** (2 * hurst) + (k + 1) ** (2 * hurst))
    spectrum = np.fft.fft(np.concatenate([r, r[-2:0:-1]])).real.clip(0)
    z = random.normal(size=2 * length) + 1j * random.normal(size=2 * length)
    return np.fft.fft(np.sqrt(spectrum / (2 * length)) * z).real[:length]

def by_hand(series):
    details = [np.mean(np.abs(level)) for level in pywt.wavedec(series, 'db1')[4:]]
    return 0.5 - np.polyfit(np.arange(len(details)), np.log2(details), 1)[0]

random = np.random.default_rng(0)
for hurst in (0.3, 0.5, 0.9):
    series = [noise(8192, hurst, random) for _ in range(20)]
    mean = lambda function: np.mean([function(values) for values in series])
    print(f'H = {hurst}: awc {mean(lambda v: wavelet_estimator(v)[0]):.2f}, with 5 added {mean(lambda v: wavelet_estimator(v + 5)[0]):.2f},',
          f'vvl {mean(lambda v: wavelet_estimator(v, "vvl")[0]):.2f}; by hand {mean(by_hand):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

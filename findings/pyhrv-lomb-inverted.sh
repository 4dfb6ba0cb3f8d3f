#!/usr/bin/env bash
# The Lomb-Scargle spectrum of pyHRV is computed at 2 pi / f in place of 2 pi f, and with milliseconds for seconds:
# a heart whose slow waves have 16 times the power of its fast ones has an LF/HF of 0.37.
#
# Packages: pyhrv 0.5.0, biosppy 2.2.4, nolds 0.5.2, spectrum 0.10.0, PeakUtils 1.3.4, numpy 1.26.4, scipy 1.10.1,
#   matplotlib 3.9.4, opencv-python 4.11.0.86, scikit-learn 1.5.2.
# Behaviour: lomb_psd takes the angular frequencies as 2 * pi / frequencies and the times in ms. The largest value
#   of each band is at a place of it that has nothing to do with the waves, and the LF/HF of hearts with slow and
#   with fast waves is about the same. welch_psd beside it finds both.
# Expected: peaks at the frequencies of the waves.
# Instead: scipy.signal.lombscargle with seconds and 2 * pi * f, or welch_psd.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'pyhrv==0.5.0' 'biosppy==2.2.4' 'nolds==0.5.2' 'spectrum==0.10.0' \
  'PeakUtils==1.3.4' 'numpy==1.26.4' 'scipy==1.10.1' 'matplotlib==3.9.4' 'opencv-python==4.11.0.86' \
  'scikit-learn==1.5.2' 'setuptools==75.8.0'
cat > expected.txt <<'EXPECTED'
waves of 40 at 0.1 Hz and 10 at 0.25 Hz: lomb_psd peaks 0.10 and 0.39, LF/HF 0.37; welch_psd 0.10 and 0.25, 16.23; by hand 0.10 and 0.25, 15.46
waves of 10 at 0.1 Hz and 40 at 0.25 Hz: lomb_psd peaks 0.08 and 0.17, LF/HF 0.52; welch_psd 0.10 and 0.25, 0.06; by hand 0.10 and 0.25, 0.06
waves of 40 at 0.06 Hz and 10 at 0.2 Hz: lomb_psd peaks 0.08 and 0.15, LF/HF 0.46; welch_psd 0.06 and 0.20, 16.10; by hand 0.06 and 0.20, 15.78
waves of 10 at 0.06 Hz and 40 at 0.35 Hz: lomb_psd peaks 0.12 and 0.26, LF/HF 0.57; welch_psd 0.06 and 0.35, 0.07; by hand 0.06 and 0.35, 0.06
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import numpy
from pyhrv.frequency_domain import lomb_psd, welch_psd
from scipy.signal import lombscargle

for low, slow, high, fast in ((40, 0.1, 10, 0.25), (10, 0.1, 40, 0.25), (40, 0.06, 10, 0.2), (10, 0.06, 40, 0.35)):
    time, series = 0, []
    while time < 300:
        series.append(900 + low * numpy.sin(2 * numpy.pi * slow * time) + high * numpy.sin(2 * numpy.pi * fast * time))
        time += series[-1] / 1000
    series = numpy.array(series)
    found = lomb_psd(series, show=False, mode='dev')[0]
    welch = welch_psd(series, show=False, mode='dev')[0]
    grid = numpy.linspace(0.04, 0.4, 361)
    powers = lombscargle(numpy.cumsum(series) / 1000, series - series.mean(), 2 * numpy.pi * grid)
    lower = grid < 0.15
    print(f'waves of {low} at {slow} Hz and {high} at {fast} Hz: lomb_psd peaks {found["lomb_peak"][1]:.2f} and {found["lomb_peak"][2]:.2f}, '
          f'LF/HF {found["lomb_ratio"]:.2f}; welch_psd {welch["fft_peak"][1]:.2f} and {welch["fft_peak"][2]:.2f}, {welch["fft_ratio"]:.2f}; '
          f'by hand {grid[lower][powers[lower].argmax()]:.2f} and {grid[~lower][powers[~lower].argmax()]:.2f}, '
          f'{powers[lower].sum() / powers[~lower].sum():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

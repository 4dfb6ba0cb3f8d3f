#!/usr/bin/env bash
# The spectral bandwidth of emgflow is not divided by the power: for a spectrum between 50 and 150 Hz it is 293
# Hz or 580 Hz by the number of its lines, where the standard deviation around the centroid is 29 Hz.
#
# Packages: emgflow 1.1.2, numpy 1.26.4, pandas 2.2.3, scipy 1.10.1, tqdm 4.67.1,
#   importlib-resources 7.1.0.
# Behaviour: calc_sbw documents that p = 2 gives the standard deviation around the centroid. It takes the root of
#   the sum of power times squared distance without dividing by the sum of the power. emg_to_psd normalises the
#   largest line to 1, so that the sum is the number of lines. calc_ss, the spread, divides. The script leaves
#   out the part for plots.
# Expected: the standard deviation, which the lines of the spectrum do not change.
# Instead: calc_ss(psd) ** 0.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.10.1' 'tqdm==4.67.1' \
  'importlib-resources==7.1.0'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'emgflow==1.1.2'
cat > expected.txt <<'EXPECTED'
50 to 150 Hz, 1 lines a Hz: bandwidth 293, by hand 29.2 Hz; root of calc_ss 29.2, centroid 100
50 to 150 Hz, 2 lines a Hz: bandwidth 411, by hand 29.0 Hz; root of calc_ss 29.0, centroid 100
50 to 150 Hz, 4 lines a Hz: bandwidth 580, by hand 28.9 Hz; root of calc_ss 28.9, centroid 100
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
import sysconfig
import types

import numpy
import pandas

sys.modules['EMGFlow'] = types.ModuleType('EMGFlow')
sys.modules['EMGFlow'].__path__ = [sysconfig.get_path('purelib') + '/EMGFlow']
from EMGFlow.extract_features import calc_sbw, calc_sc, calc_ss

for lines in (1, 2, 4):
    frequency = numpy.arange(0, 500, 1 / lines)
    power = ((frequency >= 50) & (frequency <= 150)).astype(float)
    table = pandas.DataFrame({'Frequency': frequency, 'Power': power})
    centre = (frequency * power).sum() / power.sum()
    spread = ((frequency - centre) ** 2 * power).sum() / power.sum()
    print(f'50 to 150 Hz, {lines} lines a Hz: bandwidth {calc_sbw(table):.0f}, by hand {spread ** 0.5:.1f} Hz; '
          f'root of calc_ss {calc_ss(table) ** 0.5:.1f}, centroid {calc_sc(table):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

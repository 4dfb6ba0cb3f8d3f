#!/usr/bin/env bash
# The integrated EMG of emgflow multiplies by the sampling rate where it should divide: one second of a steady
# millivolt is 1,000,000 at 1000 Hz, and 4,000,000 for the same muscle at 2000 Hz.
#
# Packages: emgflow 1.1.2, numpy 1.26.4, pandas 2.2.3, scipy 1.10.1, tqdm 4.67.1,
#   importlib-resources 7.1.0.
# Behaviour: calc_iemg is the sum of |x| times the rate, and calc_ssi the sum of (|x| times the rate) squared. An
#   integral over time is the sum divided by the rate, and the plain sum of the literature does not have it at
#   all. Twice the rate makes four times the IEMG and eight times the SSI, so that recordings of two devices
#   cannot be compared. The script leaves out the part for plots.
# Expected: 1 mV s for both rates, or the plain sum.
# Instead: calc_iemg / rate ** 2 and calc_ssi / rate ** 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.10.1' 'tqdm==4.67.1' \
  'importlib-resources==7.1.0'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'emgflow==1.1.2'
cat > expected.txt <<'EXPECTED'
steady, 1 mV, 1 s at 500 Hz: IEMG 250000, by hand 1.00 mV s; SSI 1.25e+08, by hand 1.00 mV2 s; mean 1.00
sine of 50 Hz, 1 mV, 1 s at 500 Hz: IEMG 158107, by hand 0.63 mV s; SSI 6.25e+07, by hand 0.50 mV2 s; mean 0.63
steady, 1 mV, 1 s at 1000 Hz: IEMG 1000000, by hand 1.00 mV s; SSI 1e+09, by hand 1.00 mV2 s; mean 1.00
sine of 50 Hz, 1 mV, 1 s at 1000 Hz: IEMG 638204, by hand 0.64 mV s; SSI 5e+08, by hand 0.50 mV2 s; mean 0.64
steady, 1 mV, 1 s at 2000 Hz: IEMG 4000000, by hand 1.00 mV s; SSI 8e+09, by hand 1.00 mV2 s; mean 1.00
sine of 50 Hz, 1 mV, 1 s at 2000 Hz: IEMG 2548512, by hand 0.64 mV s; SSI 4e+09, by hand 0.50 mV2 s; mean 0.64
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
import sysconfig
import types

import numpy
import pandas

sys.modules['EMGFlow'] = types.ModuleType('EMGFlow')
sys.modules['EMGFlow'].__path__ = [sysconfig.get_path('purelib') + '/EMGFlow']
from EMGFlow.extract_features import calc_iemg, calc_mav, calc_ssi

for rate in (500, 1000, 2000):
    time = numpy.arange(rate) / rate
    for name, values in (('steady', numpy.ones(rate)), ('sine of 50 Hz', numpy.sin(2 * numpy.pi * 50 * time + 0.1))):
        table = pandas.DataFrame({'Time': time, 'EMG': values})
        print(f'{name}, 1 mV, 1 s at {rate} Hz: IEMG {calc_iemg(table, "EMG", rate):.0f}, by hand {abs(values).sum() / rate:.2f} mV s; '
              f'SSI {calc_ssi(table, "EMG", rate):.4g}, by hand {(values ** 2).sum() / rate:.2f} mV2 s; mean {calc_mav(table, "EMG"):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

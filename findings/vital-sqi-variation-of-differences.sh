#!/usr/bin/env bash
# The coefficient of variation of heart beats in vital-sqi has the standard deviation of their differences: a
# heart that slowly changes between 50 and 75 beats a minute has 0.007 in place of 0.139.
#
# Packages: vital-sqi 0.1.0, numpy 1.26.4.
# Behaviour: cvnn_sqi divides the SDSD by the mean, where CVNN is the SDNN by the mean. It is nearly the same as
#   cvsd_sqi beside it. Slow changes have no part in it, and an alternating heart has twice of what it should.
#   The script loads the module alone, since the package imports much that this does not use.
# Expected: SDNN / mean.
# Instead: sdnn_sqi(x) / mean_nn_sqi(x).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'vital-sqi==0.1.0'
cat > expected.txt <<'EXPECTED'
slow, 800 to 1200 ms: cvnn 0.007, cvsd 0.007, by hand 0.139
alternating, 900 and 1100 ms: cvnn 0.200, cvsd 0.200, by hand 0.100
random: cvnn 0.071, cvsd 0.071, by hand 0.051
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import importlib.util
import sys
import sysconfig
import types

import numpy

for name in ('hrvanalysis', 'vital_sqi', 'vital_sqi.common', 'vital_sqi.common.power_spectrum', 'vital_sqi.common.rpeak_detection'):
    sys.modules[name] = types.ModuleType(name)
for name in ('get_time_domain_features', 'get_frequency_domain_features', 'get_nn_intervals', 'get_csi_cvi_features', 'get_geometrical_features'):
    setattr(sys.modules['hrvanalysis'], name, None)
sys.modules['vital_sqi.common.power_spectrum'].calculate_psd = None
sys.modules['vital_sqi.common.rpeak_detection'].PeakDetector = None
path = sysconfig.get_path('purelib') + '/vital_sqi/sqi/hrv_sqi.py'
specification = importlib.util.spec_from_file_location('hrv_sqi', path)
sqi = importlib.util.module_from_spec(specification)
specification.loader.exec_module(sqi)

beats = numpy.arange(300)
for name, intervals in (('slow, 800 to 1200 ms', 1000 + 200 * numpy.sin(beats / 20)), ('alternating, 900 and 1100 ms', 1000 + 100 * (-1.0) ** beats),
                        ('random', numpy.random.default_rng(0).normal(1000, 50, 300))):
    print(f'{name}: cvnn {sqi.cvnn_sqi(intervals):.3f}, cvsd {sqi.cvsd_sqi(intervals):.3f}, by hand '
          f'{intervals.std(ddof=1) / intervals.mean():.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

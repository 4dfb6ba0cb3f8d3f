#!/usr/bin/env bash
# The peak frequency of vital-sqi is a power, its relative power a sum of logarithms and its normalised power a
# length: heart rates that vary at 0.1 Hz have a peak frequency of 808, and a share of -0.17 in place of 0.80.
#
# Packages: vital-sqi 0.1.0, numpy 1.26.4.
# Behaviour: peak_frequency_sqi documents the frequency with the greatest power and returns pows[argmax].
#   relative_power_sqi documents the share of the total power and returns sum(log(band)) / sum(all).
#   normalized_power_sqi documents a share, too, and returns the root of LF squared + HF squared. They are
#   quality indices of the default rules. The script gives them a spectrum and loads their module alone.
# Expected: 0.1 Hz, and a share of the power between 0 and 1.
# Instead: freqs[band][pows[band].argmax()], and sums of powers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'vital-sqi==0.1.0'
cat > expected.txt <<'EXPECTED'
waves of 40 at 0.1 Hz and 20 at 0.25 Hz: peak frequency 808, by hand 0.1 Hz
  relative power -0.168, by hand 0.80; normalised power 833, by hand 0.80; LF/HF 4.00
waves of 20 at 0.1 Hz and 40 at 0.25 Hz: peak frequency 204, by hand 0.1 Hz
  relative power -0.170, by hand 0.20; normalised power 829, by hand 0.20; LF/HF 0.25
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

time = numpy.arange(1200) / 4
for low, high in ((40, 20), (20, 40)):
    series = low * numpy.sin(2 * numpy.pi * 0.1 * time) + high * numpy.sin(2 * numpy.pi * 0.25 * time)
    series += numpy.random.default_rng(0).normal(0, 2, 1200)
    powers = 2 * numpy.abs(numpy.fft.rfft(series) / 1200) ** 2
    frequencies = numpy.fft.rfftfreq(1200, 0.25)
    band = (frequencies >= 0.04) & (frequencies < 0.15)
    upper = (frequencies >= 0.15) & (frequencies < 0.4)
    print(f'waves of {low} at 0.1 Hz and {high} at 0.25 Hz: peak frequency {sqi.peak_frequency_sqi(None, frequencies, powers):.0f}, '
          f'by hand {frequencies[band][powers[band].argmax()]:.1f} Hz')
    print(f'  relative power {sqi.relative_power_sqi(None, frequencies, powers):.3f}, by hand {powers[band].sum() / powers.sum():.2f}; '
          f'normalised power {sqi.normalized_power_sqi(None, frequencies, powers):.0f}, by hand '
          f'{powers[band].sum() / (powers[band].sum() + powers[upper].sum()):.2f}; LF/HF {sqi.lf_hf_ratio_sqi(None, frequencies, powers):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

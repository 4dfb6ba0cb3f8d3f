#!/usr/bin/env bash
# pypsg-toolbox smooths oxygen saturation over five minutes before it counts desaturations: it finds no
# desaturation in a recording with 27 an hour, and all measures of desaturations are 0.
#
# Packages: pypsg-toolbox 1.0.0, pobm 1.0.1, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, scikit-learn 1.5.2,
#   lempel-ziv-complexity 0.2.2.
# Behaviour: get_spo2_biomarkers filters with a median of 301 samples. At 1 Hz, the rate for which pobm computes
#   all its measures, these are five minutes, and a median removes whatever lasts less than half of that.
#   pobm's own default is 9 samples. It does not resample, so that at other rates each measure in seconds
#   or per hour is wrong by the rate.
# Expected: the index of pobm with its own filter, 27 an hour.
# Instead: pobm on a signal of 1 Hz, with median_spo2(signal, 9).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.10.1' 'pandas==2.2.3' \
  'scikit-learn==1.5.2' 'lempel-ziv-complexity==0.2.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'pobm==1.0.1' 'pypsg-toolbox==1.0.0'
cat > expected.txt <<'EXPECTED'
dips of 30 s, 6 %: pypsg-toolbox index 0.0, lowest value 90; with the filter of pobm 27.0 and 90
dips of 100 s, 10 %: pypsg-toolbox index 0.0, lowest value 86; with the filter of pobm 15.0 and 86
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from pobm.obm.desat import DesaturationsMeasures
from pobm.prep import median_spo2, set_range
from pyPSG.biomarkers.get_spo2_bm import get_spo2_biomarkers

generator = numpy.random.default_rng(0)
for length, depth in ((30, 6), (100, 10)):
    saturation = 96 + generator.integers(0, 2, 1200).astype(float)
    for start in range(60, 1100, 120 if length == 30 else 240):
        saturation[start:start + length] -= depth * numpy.hanning(length)
    saturation = numpy.round(saturation)
    found = get_spo2_biomarkers(saturation, 1)
    right = DesaturationsMeasures().compute(median_spo2(set_range(saturation), 9))
    print(f'dips of {length} s, {depth} %: pypsg-toolbox index {found["ODI"][0]:.1f}, lowest value {found["Min"][0]:.0f}; '
          f'with the filter of pobm {right.ODI:.1f} and {saturation.min():.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

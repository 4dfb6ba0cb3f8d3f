#!/usr/bin/env bash
# The logarithmic scale of NEURAL-py-EEG for high amplitudes is applied where there are none: an amplitude of 300
# µV stays 300 where the scale gives 73, and turning the scale on changes nothing.
#
# Packages: NEURAL-py-EEG 0.1.4, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, matplotlib 3.9.4, pyedflib 0.1.38.
# Behaviour: gen_rEEG collects the amplitudes above 50 µV and converts them to 50 log(a) / log(50) if the list of
#   them is empty. Each other recording is returned as it is, with APPLY_LOG_LINEAR_SCALE and without. The
#   mean, the width and the asymmetry of the range EEG are then those of the linear scale.
# Expected: the conversion of the amplitudes above 50 µV.
# Instead: convert the list of gen_rEEG by hand.
# Source: O'Reilly and others, Peak-to-peak amplitude in neonatal brain monitoring of premature infants, Clinical
#   Neurophysiology 2012.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.10.1' 'pandas==2.2.3' 'matplotlib==3.9.4' \
  'pyedflib==0.1.38'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'NEURAL-py-EEG==0.1.4'
cat > expected.txt <<'EXPECTED'
30 and 40 µV: mean 34.8 and width 10.0 without the scale, 34.8 and 10.0 with it; by hand 34.8 and 10.0
30 and 100 µV: mean 64.7 and width 69.7 without the scale, 64.7 and 69.7 with it; by hand 44.3 and 28.9
30 and 300 µV: mean 164.2 and width 268.7 without the scale, 164.2 and 268.7 with it; by hand 51.3 and 43.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import numpy
from NEURAL_py_EEG.NEURAL_parameters import NEURAL_parameters
from NEURAL_py_EEG.rEEG import gen_rEEG, rEEG_mean, rEEG_width

parameters = NEURAL_parameters()['rEEG']
window = [parameters['overlap'], parameters['L_window'], parameters['window_type'], 64]
time = numpy.arange(64 * 60) / 64
for high in (40, 100, 300):
    amplitude = numpy.where(time < 30, 30, high) / 2
    signal = amplitude * numpy.sin(2 * numpy.pi * 4 * time + 0.1)
    plain = numpy.array(gen_rEEG(signal, *window, False))
    scaled = numpy.array(gen_rEEG(signal, *window, True))
    right = numpy.array([50 * math.log(value) / math.log(50) if value > 50 else value for value in plain])
    print(f'30 and {high} µV: mean {rEEG_mean(plain):.1f} and width {rEEG_width(plain):.1f} without the scale, '
          f'{rEEG_mean(scaled):.1f} and {rEEG_width(scaled):.1f} with it; by hand {rEEG_mean(right):.1f} and {rEEG_width(right):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The peak velocity of pycrosaccade is one of degrees per sample, where it documents degrees per second: a
# microsaccade of 25 degrees a second has 0.10, 0.05 or 0.025 at 250, 500 or 1000 samples per second.
#
# Packages: pycrosaccade 0.5.0, datamatrix 1.0.20, numpy 1.26.4, matplotlib 3.9.4.
# Behaviour: the velocity is the distance between two samples. It is converted from pixels to degrees and not
#   multiplied by the sampling frequency, and labelled "Peak velocity (degree/s)" in ms_diagnostics. The same
#   eye moves twice as fast with a tracker of half the rate.
# Expected: a velocity in degrees per second, which does not depend on the rate.
# Instead: multiply saccpvlist by the sampling frequency.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'datamatrix==1.0.20' 'numpy==1.26.4' 'matplotlib==3.9.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'pycrosaccade==0.5.0'
cat > expected.txt <<'EXPECTED'
250 Hz, half a degree in 20 ms: distance 0.50, peak velocity 0.101, times the rate 25.3, by hand 25.0
500 Hz, half a degree in 20 ms: distance 0.50, peak velocity 0.051, times the rate 25.6, by hand 25.0
1000 Hz, half a degree in 20 ms: distance 0.50, peak velocity 0.025, times the rate 25.5, by hand 25.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import matplotlib

matplotlib.use('Agg')
import numpy
from datamatrix import DataMatrix, SeriesColumn
from pycrosaccade import microsaccades

for rate in (250, 500, 1000):
    generator = numpy.random.default_rng(0)
    time = numpy.arange(2 * rate) / rate
    table = DataMatrix(length=1)
    table.ttrace_look = SeriesColumn(depth=2 * rate)
    table.xtrace_look = SeriesColumn(depth=2 * rate)
    table.ytrace_look = SeriesColumn(depth=2 * rate)
    table.ttrace_look[0] = time * 1000
    table.xtrace_look[0] = 17.3 * numpy.clip((time - 1) / 0.02, 0, 1) + generator.normal(0, 0.02, 2 * rate)
    table.ytrace_look[0] = generator.normal(0, 0.02, 2 * rate)
    with contextlib.redirect_stdout(io.StringIO()):
        microsaccades(table, sampfreq=rate)
    found = float(table.saccpvlist_look[0][0])
    print(f'{rate} Hz, half a degree in 20 ms: distance {float(table.saccdistlist_look[0][0]):.2f}, peak velocity {found:.3f}, '
          f'times the rate {found * rate:.1f}, by hand {0.5 / 0.02:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

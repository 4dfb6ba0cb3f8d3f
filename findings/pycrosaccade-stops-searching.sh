#!/usr/bin/env bash
# pycrosaccade loses all microsaccades of a trial after one that begins just before its pause ends: of four
# at 0.5, 0.61, 1.0 and 1.5 s it finds the first, and without the second it finds the three others.
#
# Packages: pycrosaccade 0.5.0, datamatrix 1.0.20, numpy 1.26.4, matplotlib 3.9.4.
# Behaviour: after a microsaccade the search goes on 100 samples later. Where the eye is moving at this sample,
#   the next start is the sample itself, and the loop ends with break. A second movement of 20 ms that begins
#   80 to 100 ms after the first ends the search of the trial, so that trials with many microsaccades have
#   few of them.
# Expected: that the movement in the pause is left out and the search goes on.
# Instead: saccISI=0, and remove events that are close to each other afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'datamatrix==1.0.20' 'numpy==1.26.4' 'matplotlib==3.9.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'pycrosaccade==0.5.0'
cat > expected.txt <<'EXPECTED'
movements of half a degree at (0.5, 1.0, 1.5) s: found at [0.5, 1.0, 1.5]
movements of half a degree at (0.5, 0.55, 1.0, 1.5) s: found at [0.5, 1.0, 1.5]
movements of half a degree at (0.5, 0.61, 1.0, 1.5) s: found at [0.5]
movements of half a degree at (0.5, 0.7, 1.0, 1.5) s: found at [0.5, 0.7, 1.0, 1.5]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import matplotlib

matplotlib.use('Agg')
import numpy
from datamatrix import DataMatrix, SeriesColumn
from pycrosaccade import microsaccades

generator = numpy.random.default_rng(0)
time = numpy.arange(2000) / 1000
for starts in ((0.5, 1.0, 1.5), (0.5, 0.55, 1.0, 1.5), (0.5, 0.61, 1.0, 1.5), (0.5, 0.7, 1.0, 1.5)):
    table = DataMatrix(length=1)
    table.ttrace_look = SeriesColumn(depth=2000)
    table.xtrace_look = SeriesColumn(depth=2000)
    table.ytrace_look = SeriesColumn(depth=2000)
    table.ttrace_look[0] = time * 1000
    table.xtrace_look[0] = sum(17.3 * numpy.clip((time - start) / 0.02, 0, 1) for start in starts) + generator.normal(0, 0.02, 2000)
    table.ytrace_look[0] = generator.normal(0, 0.02, 2000)
    with contextlib.redirect_stdout(io.StringIO()):
        microsaccades(table, sampfreq=1000)
    print(f'movements of half a degree at {starts} s: found at', [round(float(start) / 1000, 2) for start in table.saccstlist_look[0]])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

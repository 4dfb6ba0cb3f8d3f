#!/usr/bin/env bash
# The threshold filter of hrv removes beats that come late and keeps all that come early, which are the
# usual ectopic ones: three of three stay, and the SDNN is 87 ms in place of 21.
#
# Packages: hrv 0.2.10, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, matplotlib 3.9.4, spectrum 0.10.0.
# Behaviour: threshold_filter documents abs(interval - local median) > threshold for an ectopic beat. From the
#   sixth interval on it computes interval - local median > threshold, without the absolute value, so that
#   only intervals that are too long are replaced. Within the first five it takes the absolute value.
#   hrv was written for Python before 3.10: the script names collections.MutableMapping for it.
# Expected: that short intervals are replaced, too.
# Instead: threshold_filter on the series, and again on 2 * median - series, or neurokit2's signal_fixpeaks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'hrv==0.2.10' 'numpy==1.26.4' 'scipy==1.10.1' 'pandas==2.2.3' \
  'matplotlib==3.9.4' 'spectrum==0.10.0' 'setuptools==75.8.0'
cat > expected.txt <<'EXPECTED'
three early beats at (10, 25, 40): left after the filter [10, 25, 40], SDNN 87 before, 87 after, 21 without them
three late beats at (10, 25, 40): left after the filter [], SDNN 93 before, 21 after, 21 without them
three early beats at (2, 25, 40): left after the filter [25, 40], SDNN 85 before, 71 after, 21 without them
three late beats at (2, 25, 40): left after the filter [], SDNN 95 before, 21 after, 21 without them
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import collections
import collections.abc

collections.MutableMapping = collections.abc.MutableMapping
import numpy
from hrv.classical import time_domain
from hrv.filters import threshold_filter
from hrv.rri import RRi

normal = 850 + 30 * numpy.sin(numpy.arange(60) / 3)
for place in (10, 25, 40), (2, 25, 40):
    for name, change in (('early', -400), ('late', 400)):
        series = normal.copy()
        series[list(place)] += change
        kept = threshold_filter(RRi(series)).values
        left = [number for number in place if abs(kept[number] - normal[number]) > 250]
        print(f'three {name} beats at {place}: left after the filter {left}, SDNN {time_domain(series)["sdnn"]:.0f} '
              f'before, {time_domain(kept)["sdnn"]:.0f} after, {time_domain(normal)["sdnn"]:.0f} without them')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

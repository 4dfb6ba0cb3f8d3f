#!/usr/bin/env bash
# The spectrum of hrv for a part of a recording is extrapolated to its beginning: five minutes that start
# after five minutes have a power of 3.6e13 ms2 in place of 1243, and an LF/HF of 609 in place of 1.8.
#
# Packages: hrv 0.2.10, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, matplotlib 3.9.4, spectrum 0.10.0.
# Behaviour: time_range and time_split keep the times of the recording. frequency_domain resamples from time
#   0 to the last beat, whatever the first one is: the spline goes on over the minutes before the part, and
#   with interp_method='linear' they are filled with the first interval. There is no warning.
#   hrv was written for Python before 3.10: the script names collections.MutableMapping for it.
# Expected: the spectrum of the part.
# Instead: part.reset_time() before each frequency_domain.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'hrv==0.2.10' 'numpy==1.26.4' 'scipy==1.10.1' 'pandas==2.2.3' \
  'matplotlib==3.9.4' 'spectrum==0.10.0' 'setuptools==75.8.0'
cat > expected.txt <<'EXPECTED'
0 to 300 s, cubic: power 1.24e+03, LF 799, HF 442, LF/HF 1.81
0 to 300 s, linear: power 1.08e+03, LF 756, HF 320, LF/HF 2.36
0 to 300 s, cubic, reset: power 1.24e+03, LF 799, HF 442, LF/HF 1.81
300 to 600 s, cubic: power 3.57e+13, LF 7.7e+10, HF 1.26e+08, LF/HF 609.38
300 to 600 s, linear: power 512, LF 358, HF 152, LF/HF 2.36
300 to 600 s, cubic, reset: power 1.24e+03, LF 799, HF 442, LF/HF 1.81
600 to 900 s, cubic: power 1.93e+15, LF 4.16e+12, HF 6.85e+09, LF/HF 608.28
600 to 900 s, linear: power 354, LF 246, HF 104, LF/HF 2.37
600 to 900 s, cubic, reset: power 1.24e+03, LF 799, HF 442, LF/HF 1.81
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import collections
import collections.abc

collections.MutableMapping = collections.abc.MutableMapping
import numpy
from hrv.classical import frequency_domain
from hrv.rri import RRi

time, series = 0, []
while time < 900:
    series.append(900 + 40 * numpy.sin(2 * numpy.pi * 0.1 * time) + 30 * numpy.sin(2 * numpy.pi * 0.25 * time))
    time += series[-1] / 1000
recording = RRi(series)
for start in (0, 300, 600):
    part = recording.time_range(start, start + 300)
    for name, segment, method in (('cubic', part, 'cubic'), ('linear', part, 'linear'), ('cubic, reset', part.reset_time(), 'cubic')):
        found = frequency_domain(segment, interp_method=method)
        print(f'{start} to {start + 300} s, {name}: power {found["total_power"]:.3g}, LF {found["lf"]:.3g}, HF {found["hf"]:.3g}, '
              f'LF/HF {found["lf_hf"]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

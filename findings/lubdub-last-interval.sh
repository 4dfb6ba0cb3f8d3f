#!/usr/bin/env bash
# The standard deviation of lubdub leaves the last interval out: the same beats backwards have another one.
#
# Packages: lubdub 0.0.2.6.1, numpy 2.2.6.
# Behaviour: sdnn adds the squared distances from the mean of all intervals but the last one, and
#   divides by one less than their number, which is right for all of them. pnn50 and rmssd divide the
#   sums over n - 1 differences by n.
# Expected: the sample standard deviation, whose value does not depend on the order; and a pnn50 of
#   1 for a heart whose intervals all differ by more than 50 ms from the one before.
# Why it matters here: short windows are compared, in which one interval counts.
# Instead: numpy.std with ddof=1, and the means of numpy.diff.
# Source: Task Force, Heart rate variability: standards of measurement, Circulation 1996.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'lubdub==0.0.2.6.1'
cat > expected.txt <<'EXPECTED'
an early beat at the end: SDNN 80, by its definition 178; RMSSD 177, 198; pNN50 0.20, 0.25
the same backwards: SDNN 174, by its definition 178; RMSSD 177, 198; pNN50 0.20, 0.25
alternating: SDNN 102, by its definition 110; RMSSD 179, 200; pNN50 0.80, 1.00
five minutes: SDNN 40, by its definition 40; RMSSD 57, 57; pNN50 0.35, 0.35
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from lubdub.calc import pnn50, rmssd, sdnn

random = np.random.default_rng(0)
windows = {'an early beat at the end': [800, 810, 790, 805, 1200], 'the same backwards': [1200, 805, 790, 810, 800],
           'alternating': [700, 900, 700, 900, 700], 'five minutes': random.normal(850, 40, 350).round().tolist()}
for title, beats in windows.items():
    steps = np.diff(beats)
    print(f'{title}: SDNN {sdnn(beats):.0f}, by its definition {np.std(beats, ddof=1):.0f};',
          f'RMSSD {rmssd(beats):.0f}, {np.sqrt(np.mean(steps ** 2)):.0f};',
          f'pNN50 {pnn50(beats):.2f}, {np.mean(np.abs(steps) > 50):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

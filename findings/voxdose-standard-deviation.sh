#!/usr/bin/env bash
# voxdose reports a standard deviation of 0.5 dB for a voice that changes between 60 and 80 dB, and 1.75 dB for a steady one
# with pauses.
#
# Packages: voxdose 1.0.0, numpy 2.2.6.
# Behaviour: SPL_sd and F0_sd are the deviation of level times time step, with a zero for each frame without a voice. So the
#   step, 0.05 s, is a factor, and the pauses are most of the rest. The report of the program calls it "SPL standard
#   deviation (dBA)". A comment has "simple dispersion of the time-weighted series".
# Expected: 10 dB for the first and 0 for the second, of the frames with a voice, as the mean beside it is computed.
# Why it matters here: a monotonous voice and an expressive one are told apart by this number, and the pauses decide it.
# Instead: numpy.std of the levels of the voiced frames.
# Source: the standard deviation of the levels that were put in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'voxdose==1.0.0'
cat > expected.txt <<'EXPECTED'
steady 70 dB: mean 70.0 dB, standard deviation 0.00 dB, by hand 0.00 dB
steady 70 dB, silent in half of the frames: mean 70.0 dB, standard deviation 1.75 dB, by hand 0.00 dB
60 and 80 dB in turn: mean 70.0 dB, standard deviation 0.50 dB, by hand 10.00 dB
60 and 80 dB in turn, in pairs, half silent: mean 70.0 dB, standard deviation 1.79 dB, by hand 10.00 dB
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from voxdose_core.dosi import DOSI

time = np.arange(0, 60, 0.05)
voiced = np.arange(len(time)) % 2 == 0
for name, level, kept in (('steady 70 dB', np.full(len(time), 70.0), np.full(len(time), True)),
                          ('steady 70 dB, silent in half of the frames', np.full(len(time), 70.0), voiced),
                          ('60 and 80 dB in turn', np.where(voiced, 60.0, 80.0), np.full(len(time), True)),
                          ('60 and 80 dB in turn, in pairs, half silent', np.where(np.arange(len(time)) % 4 < 2, 60.0, 80.0), voiced)):
    dose = DOSI(np.column_stack([time, np.where(kept, level, 0), np.where(kept, 120.0, 0)]), 'male')
    print(f'{name}: mean {dose[9]:.1f} dB, standard deviation {dose[11]:.2f} dB, by hand {level[kept].std():.2f} dB')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

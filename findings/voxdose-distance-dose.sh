#!/usr/bin/env bash
# The distance dose of voxdose is 20 times too long: the vocal folds of a man who speaks travel 12 to 15 m in a second.
#
# Packages: voxdose 1.0.0, numpy 2.2.6.
# Behaviour: the amplitude of the vibration has the length of the time step where the formula has the constant 0.05. With a
#   usual step of 0.05 s this is the same number, but the sum over the steps that makes a distance out of it is then not
#   multiplied by the time. With other steps the two cancel in the same way.
# Expected: Dd = 4 times the integral of amplitude and frequency, with an amplitude of 0.05 times the length of the folds,
#   16 or 10 mm, times the root of the relative excess of the pressure.
# Why it matters here: the safe distance that is derived in the paper, 500 m, is passed in less than a minute.
# Instead: divide Dd and its rate by 20.
# Source: Titze, Svec and Popolo, J Speech Lang Hear Res 46 (2003) 919 (PMC3158591), where 500 m are about 17 minutes of
#   continuous vocalization.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'voxdose==1.0.0'
cat > expected.txt <<'EXPECTED'
male, 65 dB, 120 Hz: voxdose 12.53 m/s, by hand 0.63 m/s (amplitude 1.3 mm), 500 m after 0.7 and 13.3 minutes
male, 70 dB, 120 Hz: voxdose 15.47 m/s, by hand 0.77 m/s (amplitude 1.6 mm), 500 m after 0.5 and 10.8 minutes
female, 65 dB, 190 Hz: voxdose 12.40 m/s, by hand 0.62 m/s (amplitude 0.8 mm), 500 m after 0.7 and 13.4 minutes
female, 75 dB, 220 Hz: voxdose 20.84 m/s, by hand 1.04 m/s (amplitude 1.2 mm), 500 m after 0.4 and 8.0 minutes
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from voxdose_core.dosi import DOSI


def by_hand(level, pitch, mode):
    length, usual = {'male': (0.016, 120), 'female': (0.010, 190)}[mode]
    threshold = 0.14 + 0.06 * (pitch / usual) ** 2
    amplitude = 0.05 * length * (10 ** ((level - 72.48) / 27.3) / threshold) ** 0.5
    return 4 * amplitude * pitch, 1000 * amplitude


for mode, level, pitch in (('male', 65, 120), ('male', 70, 120), ('female', 65, 190), ('female', 75, 220)):
    time = np.arange(0, 60, 0.05)
    rate = DOSI(np.column_stack([time, np.full(len(time), level), np.full(len(time), pitch)]), mode)[6]
    true, amplitude = by_hand(level, pitch, mode)
    print(f'{mode}, {level} dB, {pitch} Hz: voxdose {rate:.2f} m/s, by hand {true:.2f} m/s (amplitude {amplitude:.1f} mm), '
          f'500 m after {500 / rate / 60:.1f} and {500 / true / 60:.1f} minutes')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

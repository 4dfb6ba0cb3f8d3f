#!/usr/bin/env bash
# edfrw cuts values where it converts them for an EDF file, so that reading and writing changes
# them.
#
# Packages: edfrw 1.0.0, numpy 1.26.4.
# Behaviour: phys_to_dig cuts the digital value towards zero in place of rounding it. A value is up
#   to one unit away from the one that was measured, always towards the value of digital zero, and
#   of the 4096 codes of a 12-bit sensor 631 come back as their neighbour after one conversion to
#   physical values and back.
# Expected: the nearest code: an error of half a unit at most, and each code as it was.
# Instead: numpy.rint of (value - physical_max) / gain + digital_max.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'edfrw==1.0.0'
cat > expected.txt <<'EXPECTED'
4096 codes: 631 changed, with rounding 0
values from 0 to 49.9: error in units 0.0 to 1.0, mean 0.5
values from 50.1 to 100: error in units -1.0 to 0.0, mean -0.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import edfrw
import numpy as np

signal = edfrw.EdfSignal(label='SpO2', sampling_freq=10, physical_dim='%', physical_min=0, physical_max=100,
                         digital_min=-2048, digital_max=2047)
codes = np.arange(-2048, 2048)
back = signal.phys_to_dig(signal.dig_to_phys(codes)).astype(np.int16)
rounded = np.rint((signal.dig_to_phys(codes) - signal.physical_max) / signal.gain + signal.digital_max)
print(f'{len(codes)} codes: {np.sum(back != codes)} changed, with rounding {np.sum(rounded != codes)}')
for low, high in ((0, 49.9), (50.1, 100)):
    values = np.linspace(low, high, 100001)
    error = (signal.dig_to_phys(signal.phys_to_dig(values)) - values) / signal.gain
    print(f'values from {low} to {high}: error in units {error.min():.1f} to {error.max():.1f}, mean {error.mean():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The widest differentiator of eoglib divides only its last term by the step: an eye that turns by 100 degrees
# in a second has 50.6 at 1000 samples per second and 83.6 at 250, and all its others find 100.
#
# Packages: eoglib 0.2.1, numba 0.60.0, numpy 1.26.4.
# Behaviour: lanczos_13 closes a bracket early: (f1 + ... + 5 f5) + 6 f6 / (182 h) in place of
#   (f1 + ... + 6 f6) / (182 h). Only the last difference is a velocity, 0.4 of the right one; the rest are
#   raw differences of positions, whose part depends on the sampling rate. A threshold of 30 degrees a
#   second then means 59.
# Expected: 100 degrees a second for each differentiator, up to noise.
# Instead: lanczos_11, which is the default, or super_lanczos_11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numba==0.60.0' 'numpy==1.26.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'eoglib==0.2.1'
cat > expected.txt <<'EXPECTED'
250 Hz: {'central_difference_9': 100.0, 'lanczos_9': 100.0, 'lanczos_11': 100.0, 'lanczos_13': 83.6, 'super_lanczos_11': 100.0} lanczos_13 by hand 100.0
1000 Hz: {'central_difference_9': 100.0, 'lanczos_9': 100.0, 'lanczos_11': 100.0, 'lanczos_13': 50.6, 'super_lanczos_11': 100.0} lanczos_13 by hand 100.0
2000 Hz: {'central_difference_9': 100.0, 'lanczos_9': 100.0, 'lanczos_11': 100.0, 'lanczos_13': 45.1, 'super_lanczos_11': 100.0} lanczos_13 by hand 100.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from eoglib import differentiation

for rate in (250, 1000, 2000):
    eye = 100 * numpy.arange(400) / rate
    found = {name: differentiation.differentiate(eye, 1 / rate, getattr(differentiation, name))[200]
             for name in ('central_difference_9', 'lanczos_9', 'lanczos_11', 'lanczos_13', 'super_lanczos_11')}
    part = sum(k * (eye[200 + k] - eye[200 - k]) for k in range(1, 7)) * rate / 182
    print(f'{rate} Hz:', {name: round(float(value), 1) for name, value in found.items()}, f'lanczos_13 by hand {part:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

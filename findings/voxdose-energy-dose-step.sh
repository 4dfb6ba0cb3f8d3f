#!/usr/bin/env bash
# The energy dissipation dose of voxdose depends on the square of the time step: one voice has a 25th of it with a step of
# 0.01 s in place of 0.05 s.
#
# Packages: voxdose 1.0.0, numpy 2.2.6.
# Behaviour: the amplitude of the vibration has the time step as a factor, where the formula has the constant 0.05. It is
#   squared for the energy and then multiplied by the step once more. All other doses are sums over time.
# Expected: the same dose for the same minute of the same voice, as the columns beside it have.
# Why it matters here: DOSI reads the step from the data and asks for 0.05 s only "preferably". Values of two recorders with
#   different frames are compared, and they differ by the frames.
# Instead: use frames of 0.05 s, or multiply the dose by (0.05 / step) squared.
# Source: the same minute with four steps; Titze, Svec and Popolo, J Speech Lang Hear Res 46 (2003) 919 (PMC3158591).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'voxdose==1.0.0'
cat > expected.txt <<'EXPECTED'
step 0.01 s: time dose 60, cycles 7.2, energy dissipation dose 3.168, radiated energy dose 7.54
step 0.025 s: time dose 60, cycles 7.2, energy dissipation dose 19.8, radiated energy dose 7.54
step 0.05 s: time dose 60, cycles 7.2, energy dissipation dose 79.19, radiated energy dose 7.54
step 0.1 s: time dose 60, cycles 7.2, energy dissipation dose 316.8, radiated energy dose 7.54
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from voxdose_core.dosi import DOSI

names = ('time dose', 'cycles', 'energy dissipation dose', 'radiated energy dose')
for step in (0.01, 0.025, 0.05, 0.1):
    time = np.arange(0, 60, step)
    dose = DOSI(np.column_stack([time, np.full(len(time), 70.0), np.full(len(time), 120.0)]), 'male')
    print(f'step {step} s: ' + ', '.join(f'{name} {dose[place]:.4g}' for name, place in zip(names, (0, 1, 3, 4))))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

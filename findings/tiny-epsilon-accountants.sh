#!/usr/bin/env bash
# The default accountants of Opacus and dp-accounting report many times the true ε where it is tiny.
#
# Packages: opacus 1.6.0, dp-accounting 0.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: for a sampling rate of 1.6e-5, σ = 8.1, 582 steps and δ = 1.5e-9 Opacus's PRV accountant
#   reports 0.01, its allowed error, for any tiny ε, and dp-accounting 1.3e-3, since its grid of
#   1e-4 rounds each loss up. A grid of 1e-6 gives 1.8e-4. Both are true upper bounds, but a noise
#   multiplier that is calibrated to such an ε is too large, and by default Opacus reaches no target
#   below 0.01.
# Expected: a grid that follows the size of the losses, or a warning.
# Instead: give dp-accounting a value_discretization_interval far below ε, and compare two of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'dp-accounting==0.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
Opacus, PRV accountant: 0.01
dp-accounting, grid 0.0001: 1.3e-03
dp-accounting, grid 1e-05: 3.7e-04
dp-accounting, grid 1e-06: 1.8e-04
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import dp_accounting
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant

RATE, SIGMA, STEPS, DELTA = 1.6e-5, 8.1, 582, 1.5e-9
accountant = PRVAccountant()
accountant.history = [(SIGMA, RATE, STEPS)]
print(f'Opacus, PRV accountant: {accountant.get_epsilon(DELTA):.2g}')
release = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(SIGMA))
for grid in (1e-4, 1e-5, 1e-6):
    accountant = PLDAccountant(value_discretization_interval=grid)
    accountant.compose(dp_accounting.SelfComposedDpEvent(release, STEPS))
    print(f'dp-accounting, grid {grid}: {accountant.get_epsilon(DELTA):.1e}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

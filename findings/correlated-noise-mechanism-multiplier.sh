#!/usr/bin/env bash
# correlated-noise-mechanism computes noise for several times the ε that is asked for.
#
# Packages: torch 2.13.0, numpy 1.26.4, scipy 1.13.1, opacus 1.6.0, dp-accounting 0.6.0,
#   correlated-noise-mechanism 0.4.0.
# Behaviour: get_noise_multiplier(mode="Multi-Epoch-BLT", participation="streaming") divides by 2 ε
#   where the other modes divide by 2 ρ, the zero-concentrated budget that fits ε and δ, so that it
#   returns the same noise for each δ. Without any correlation (a = 0), one epoch is a Gaussian
#   mechanism of sensitivity 1: for ε = 1 and δ = 1e-5 its noise is 0.71 and its ε 6.6, and 9.1 for
#   δ = 1e-9. mode="BLT" takes the norm of the first column, 1.52 in the example, where the formula
#   has its square, so that ε = 8 is 9.6. Multi-Epoch-BLT with minSep has the square and is right.
# Expected: noise whose ε is at most the target.
# Instead: the norm of the first column times the noise that dp-accounting finds for one Gaussian
#   mechanism, or minSep.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==1.26.4' 'scipy==1.13.1' 'opacus==1.6.0' 'dp-accounting==0.6.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'correlated-noise-mechanism==0.4.0'
cat > expected.txt <<'EXPECTED'
no correlation, asked for 1 at 1e-05: streaming 0.71, ε 6.6; BLT 4.05, ε 0.9
no correlation, asked for 1 at 1e-09: streaming 0.71, ε 9.1; BLT 5.78, ε 0.9
no correlation, asked for 8 at 1e-05: streaming 0.25, ε 24.4; BLT 0.64, ε 7.4
no correlation, asked for 8 at 1e-09: streaming 0.25, ε 31.4; BLT 0.83, ε 7.6
first column of norm 1.52, asked for 1: BLT 4.99, ε 1.15; minSep 6.16, ε 0.91
first column of norm 1.52, asked for 8: BLT 0.79, ε 9.59; minSep 0.97, ε 7.43
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import torch
from correlated_noise_mechanism.utils import get_noise_multiplier
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

def compute_epsilon(noise, delta):
    accountant = PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(noise))
    return accountant.get_epsilon(delta)

for target in (1.0, 8.0):
    for delta in (1e-5, 1e-9):
        terms = {
            'target_epsilon': target, 'target_delta': delta, 'sample_rate': 0.01,
            'a': torch.zeros(1), 'lamda': torch.zeros(1)}
        noise = get_noise_multiplier(mode='Multi-Epoch-BLT', participation='streaming', epochs=1, **terms)
        other = get_noise_multiplier(mode='BLT', **terms)
        print(f'no correlation, asked for {target:.0f} at {delta:.0e}: streaming {noise:.2f}, ε {compute_epsilon(noise, delta):.1f};',
              f'BLT {other:.2f}, ε {compute_epsilon(other, delta):.1f}')
column = [1] + [0.5 * 0.9 ** (step - 1) for step in range(1, 100)]
norm = math.sqrt(sum(entry ** 2 for entry in column))
for target in (1.0, 8.0):
    terms = {
        'target_epsilon': target, 'target_delta': 1e-5, 'sample_rate': 0.01,
        'a': torch.tensor([0.5]), 'lamda': torch.tensor([0.9])}
    noise = get_noise_multiplier(mode='BLT', **terms)
    other = float(get_noise_multiplier(mode='Multi-Epoch-BLT', participation='minSep', d=1, k=1, b=100, **terms))
    print(f'first column of norm {norm:.2f}, asked for {target:.0f}: BLT {noise:.2f}, ε {compute_epsilon(noise / norm, 1e-5):.2f};',
          f'minSep {other:.2f}, ε {compute_epsilon(other / norm, 1e-5):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The accountants of fairswarm report too small an ε for sampled Gaussian noise.
#
# Packages: fairswarm 0.6.2, dp-accounting 0.6.0, numpy 2.4.6, scipy 1.17.1, pydantic 2.12.5.
# Behaviour: MomentsAccountant and RDPAccountant compute the Rényi divergence of sampled Gaussian noise
#   for whole orders, and return the smaller of it and q² α / (2 σ²), "the simpler (looser) bound". This
#   is no bound: the divergence is about q² α (exp(1 / σ²) - 1) / 2 for small rates, which is larger, 13
#   times for σ = 0.5, and more for high orders. The smaller one is always the wrong one.
# Expected: an ε that is not below the true one. The reference here composes the exact distributions of
#   the privacy loss; order 2 is shown by hand.
# Instead: dp_accounting or another accountant.
# Source: Mironov, Talwar and Zhang, Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dp-accounting==0.6.0' 'numpy==2.4.6' \
  'scipy==1.17.1' 'pydantic==2.12.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fairswarm==0.6.2'
cat > expected.txt <<'EXPECTED'
noise 2.0, rate 0.01, 1000 steps: by the privacy loss 0.62, MomentsAccountant 0.77, RDPAccountant 0.77
noise 1.0, rate 0.01, 1000 steps: by the privacy loss 1.83, MomentsAccountant 1.57, RDPAccountant 1.57
noise 0.7, rate 0.02, 2000 steps: by the privacy loss 12.88, MomentsAccountant 6.95, RDPAccountant 6.95
noise 0.5, rate 0.01, 1000 steps: by the privacy loss 13.36, MomentsAccountant 3.23, RDPAccountant 3.23
noise 0.5, rate 0.01, 100 steps: by the privacy loss 6.48, MomentsAccountant 0.98, RDPAccountant 0.98
order 2, noise 0.5, rate 0.01, one step: by hand 0.00535, fairswarm 0.00040
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import dp_accounting
from dp_accounting.pld import PLDAccountant
from fairswarm.privacy.accountant import MomentsAccountant, RDPAccountant

for noise, rate, steps in ((2.0, 0.01, 1000), (1.0, 0.01, 1000), (0.7, 0.02, 2000), (0.5, 0.01, 1000), (0.5, 0.01, 100)):
    moments, renyi = MomentsAccountant(noise_multiplier=noise, sampling_rate=rate), RDPAccountant()
    for _ in range(steps):
        moments.step()
        renyi.step(noise_multiplier=noise, sampling_rate=rate)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    right = PLDAccountant().compose(step, steps).get_epsilon(1e-5)
    print(f'noise {noise}, rate {rate}, {steps} steps: by the privacy loss {right:.2f},',
          f'MomentsAccountant {moments.get_epsilon(1e-5):.2f}, RDPAccountant {renyi.get_epsilon(1e-5):.2f}')
noise, rate = 0.5, 0.01
one = RDPAccountant(orders=[2])
one.step(noise_multiplier=noise, sampling_rate=rate)
by_hand = math.log(1 + rate**2 * (math.exp(1 / noise**2) - 1))
print(f'order 2, noise {noise}, rate {rate}, one step: by hand {by_hand:.5f}, fairswarm {one._rdp_values[2]:.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

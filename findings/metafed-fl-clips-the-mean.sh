#!/usr/bin/env bash
# The federated privacy of metafed-fl clips the mean of the clients in the place of each client.
#
# Packages: metafed-fl 1.0.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: privatize_aggregation averages the updates as they are, clips the mean to clip_norm, and adds
#   noise for a sensitivity of clip_norm. One client with a large update decides the direction of the
#   mean, and the other nine have no part in the result. Two results can be two clip norms apart, twice
#   the distance that the noise is made for. The ε here is large so that the mean is seen through the
#   noise.
# Expected: each update is clipped, and one client of ten moves the mean by at most clip_norm / 10, or
#   twice this if it is replaced: "Handles client-level DP".
# Instead: dp_mechanism.clip_gradients for each update before.
# Source: McMahan and others, Learning Differentially Private Recurrent Language Models, 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'metafed-fl==1.0.0'
cat > expected.txt <<'EXPECTED'
tenth client 0.5: mean of 200 noisy results 0.53, with each update clipped 0.54; sensitivity of the noise 1
tenth client -3: mean of 200 noisy results 0.19, with each update clipped 0.39; sensitivity of the noise 1
tenth client -1000: mean of 200 noisy results -1.00, with each update clipped 0.39; sensitivity of the noise 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import os
import sys
import types

# the package imports models and data sets at once, which are not needed here
package = types.ModuleType('metafed')
package.__path__ = [next(f'{folder}/metafed' for folder in sys.path if os.path.isdir(f'{folder}/metafed'))]
sys.modules['metafed'] = package
import torch
from metafed.privacy.differential_privacy import FederatedDifferentialPrivacy

torch.manual_seed(0)
ordinary = [{'weight': torch.tensor([0.5 + 0.01 * i])} for i in range(10)]
for value in (0.5, -3.0, -1000.0):
    updates = [*ordinary[:9], {'weight': torch.tensor([value])}]
    seen = []
    for _ in range(200):
        privacy = FederatedDifferentialPrivacy(epsilon=100.0, delta=1e-5, sampling_rate=1.0, clip_norm=1.0)
        seen.append(privacy.privatize_aggregation(updates, 0)['weight'].item())
    mechanism = privacy.dp_mechanism
    clipped = torch.stack([mechanism.clip_gradients(update)['weight'] for update in updates]).mean().item()
    print(f'tenth client {value:g}: mean of 200 noisy results {sum(seen) / 200:.2f}, with each update clipped {clipped:.2f};',
          f'sensitivity of the noise {mechanism.sensitivity:g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

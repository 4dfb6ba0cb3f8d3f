#!/usr/bin/env bash
# deepee draws the same noise in each step where a seed is given.
#
# Packages: torch 2.13.0, numpy 1.26.4, scipy 1.13.1, deepee 0.1.9.
# Behaviour: PrivacyWrapper(seed=...) documents a seed for its random numbers. noise_gradient sets
#   it anew before each parameter, so that all steps, and all parameters of one shape, get one draw.
#   What was added in one step can be taken from all others; the accountant counts independent
#   noise. Each call of the seed also resets the global generator of the training. A seed of 0 is
#   taken for none.
# Expected: one stream of random numbers that starts at the seed.
# Instead: no seed; torch.manual_seed once before the training.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'deepee==0.1.9'
cat > expected.txt <<'EXPECTED'
seed None: noise of steps 2 and 3 equal to the noise of step 1: [False, False], of the second layer equal to the first: False
seed 7: noise of steps 2 and 3 equal to the noise of step 1: [True, True], of the second layer equal to the first: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch import nn

# the wrapper calls parallel_apply, which needs an accelerator in this version of torch
torch.nn.parallel.parallel_apply = lambda models, inputs: [model(row) for model, row in zip(models, inputs)]
from deepee import PrivacyWrapper

def collect_noise(seed):
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    wrapper = PrivacyWrapper(layers, num_replicas=4, L2_clip=1.0, noise_multiplier=1.0, seed=seed)
    steps = []
    for _ in range(3):
        (0 * wrapper(torch.ones(4, 3))).sum().backward()
        wrapper.clip_and_accumulate()
        wrapper.noise_gradient()
        steps.append([parameter.grad.clone() for parameter in wrapper.wrapped_model.parameters()])
        wrapper.prepare_next_batch()
    return steps

torch.manual_seed(1)
for seed in (None, 7):
    steps = collect_noise(seed)
    between = [torch.equal(steps[0][0], other[0]) for other in steps[1:]]
    print(f'seed {seed}: noise of steps 2 and 3 equal to the noise of step 1: {between},',
          f'of the second layer equal to the first: {torch.equal(steps[0][0], steps[0][1])}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

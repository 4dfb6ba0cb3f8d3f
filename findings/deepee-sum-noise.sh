#!/usr/bin/env bash
# deepee adds the noise of a mean to a sum of gradients.
#
# Packages: torch 2.13.0, numpy 1.26.4, scipy 1.13.1, deepee 0.1.9.
# Behaviour: clip_and_accumulate(reduce="sum") adds the clipped gradients, so that one example moves
#   the result by up to L2_clip. noise_gradient always adds noise of L2_clip · noise_multiplier /
#   num_replicas, which fits the mean alone. A gradient that is summed has a noise that is smaller
#   by the batch size, and PrivacyWatchdog reports the ε of the multiplier that was given.
# Expected: noise of L2_clip · noise_multiplier for the sum.
# Instead: reduce="mean", with a learning rate that is larger by the batch size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'deepee==0.1.9'
cat > expected.txt <<'EXPECTED'
mean: one example moves it by up to 0.016, noise 0.02, true multiplier 1
sum: one example moves it by up to 1, noise 0.02, true multiplier 0.02
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch import nn

# the wrapper calls parallel_apply, which needs an accelerator in this version of torch
torch.nn.parallel.parallel_apply = lambda models, inputs: [model(row) for model, row in zip(models, inputs)]
from deepee import PrivacyWrapper

batch, clip = 64, 1.0
torch.manual_seed(0)
for reduce in ('mean', 'sum'):
    wrapper = PrivacyWrapper(nn.Linear(100, 100, bias=False), num_replicas=batch, L2_clip=clip, noise_multiplier=1.0)
    (0 * wrapper(torch.ones(batch, 100))).sum().backward()
    wrapper.clip_and_accumulate(reduce)
    wrapper.noise_gradient()
    deviation = next(wrapper.wrapped_model.parameters()).grad.std().item()
    share = clip / batch if reduce == 'mean' else clip
    multiplier = deviation / share
    print(f'{reduce}: one example moves it by up to {share:.2g}, noise {deviation:.1g}, true multiplier {multiplier:.1g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

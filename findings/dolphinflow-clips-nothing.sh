#!/usr/bin/env bash
# The gradient clipping of dolphinflow is given the gradients in the place of the parameters and
# clips nothing.
#
# Packages: dolphinflow 0.2.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: step hands the list of gradients to clip_grad_norm_, which reads the gradient of each
#   of its tensors. Gradients have none, so the norm is 0 and nothing is scaled, without a word.
# Expected: "gradient_clipping: Max norm of the gradients", 1.0 unless told otherwise. With a
#   learning rate of 1 and no other feature the move is at most that norm, as it is by
#   clip_grad_norm_ of the parameters and SGD.
# Why it matters here: one bad batch moves the weights without bound, and in private training a
#   clip that isn't there leaves the noise too small for any promise.
# Instead: call torch.nn.utils.clip_grad_norm_ with the parameters before the step.
# Source: torch.nn.utils.clip_grad_norm_ with the parameters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dolphinflow==0.2.0'
cat > expected.txt <<'EXPECTED'
gradient of norm 0.5, clipping 1: moved 0.5; clipped and by SGD 0.5
gradient of norm 0.5, clipping 0.1: moved 0.5; clipped and by SGD 0.1
gradient of norm 10, clipping 1: moved 10; clipped and by SGD 1
gradient of norm 10, clipping 0.1: moved 10; clipped and by SGD 0.1
gradient of norm 1000, clipping 1: moved 1000; clipped and by SGD 1
gradient of norm 1000, clipping 0.1: moved 1000; clipped and by SGD 0.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from dolphinflow import DolphinFlow


def moved(bound, gradient, ours):
    """Return how far one step with a learning rate of 1 moves the weights."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    weight.grad = gradient.clone()
    if ours:
        torch.nn.utils.clip_grad_norm_([weight], bound)
        optimizer = torch.optim.SGD([weight], lr=1.0)
    else:
        optimizer = DolphinFlow([weight], lr=1.0, weight_decay=0.0, momentum=0.0, ortho_mode=None, adaptive_lr=False, gradient_clipping=bound)
    optimizer.step()
    return weight.detach().norm().item()


for norm in (0.5, 10.0, 1000.0):
    gradient = torch.tensor([0.5, -0.5, 0.5, 0.5], dtype=torch.float64) * norm
    for bound in (1.0, 0.1):
        print(f'gradient of norm {norm:g}, clipping {bound:g}: moved {moved(bound, gradient, False):.4g}; clipped and by SGD {moved(bound, gradient, True):.4g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

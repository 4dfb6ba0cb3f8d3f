#!/usr/bin/env bash
# The adaptive clipping of agc-optims measures linear layers by input and not by unit, so one unit
# with a large gradient clips all others.
#
# Packages: agc-optims 0.0.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: unitwise_norm takes the norm of a matrix over its first dimension, which is right for
#   the (in, out) matrices of the original code in JAX. PyTorch's linear layers are (out, in), so
#   each norm is taken over the units for one input. A unit whose gradient is a thousand times the
#   ones of the others shrinks these to 2 to 6 % although they are within the limit, and is itself
#   left with twice what its weights allow. Convolutions are right.
# Expected: each row of gradients at most 0.01 of the norm of its row of weights, and other rows
#   untouched.
# Instead: the norm over dimension 1 for torch.nn.Linear.
# Source: Brock and others, High-Performance Large-Scale Image Recognition Without Normalization,
#   ICML 2021, equation 3, where W_i is a row, the weights of one unit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'agc-optims==0.0.2'
cat > expected.txt <<'EXPECTED'
unit 0: norm of the weights 1.00, of the gradient 5.0000, clipped to 0.0200, by the paper 0.0100
unit 1: norm of the weights 1.00, of the gradient 0.0050, clipped to 0.0001, by the paper 0.0050
unit 2: norm of the weights 1.00, of the gradient 0.0050, clipped to 0.0003, by the paper 0.0050
unit 3: norm of the weights 1.00, of the gradient 0.0050, clipped to 0.0001, by the paper 0.0050
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from agc_optims.utils import agc

torch.manual_seed(0)
layer = torch.nn.Linear(50, 4, bias=False)
with torch.no_grad():
    layer.weight.copy_(torch.nn.functional.normalize(torch.randn(4, 50), dim=1))
gradient = 0.005 * torch.nn.functional.normalize(torch.randn(4, 50), dim=1)
gradient[0] *= 1000
layer.weight.grad = gradient.clone()
agc(layer.weight, clipping=0.01, eps=1e-3)
for unit in range(4):
    weight, before, after = layer.weight[unit].norm().item(), gradient[unit].norm().item(), layer.weight.grad[unit].norm().item()
    print(f'unit {unit}: norm of the weights {weight:.2f}, of the gradient {before:.4f}, clipped to {after:.4f}, by the paper {min(before, 0.01 * weight):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

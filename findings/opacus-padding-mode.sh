#!/usr/bin/env bash
# Opacus computes wrong per-example gradients for convolutions whose padding_mode is not zeros.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build).
# Behaviour: the sum of grad_sample over the batch should be the weight's gradient of the summed
#   loss. With padding_mode reflect, replicate or circular it is off by about a quarter, because
#   the patches are taken from the input padded with zeros. ModuleValidator accepts the model. No
#   error, no warning.
# Expected: the same sum, as with padding_mode zeros, or an error.
# Instead: pad in a step of its own (torch.nn.functional.pad) in front of a convolution without
#   padding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
zeros complaints 0 right
reflect complaints 0 wrong
replicate complaints 0 wrong
circular complaints 0 wrong
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images = torch.randn(8, 3, 12, 12)
for mode in ('zeros', 'reflect', 'replicate', 'circular'):
    model = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    complaints = ModuleValidator.validate(model)
    wrapped = GradSampleModule(model, loss_reduction='sum')
    wrapped(images).tanh().square().sum().backward()
    whole = model.weight.grad
    off = (model.weight.grad_sample.sum(0) - whole).norm() / whole.norm()
    print(mode, 'complaints', len(complaints), 'right' if off < 1e-9 else 'wrong')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

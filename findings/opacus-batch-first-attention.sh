#!/usr/bin/env bash
# ModuleValidator.fix of Opacus changes what a transformer with batch_first=True computes.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: fix() replaces nn.MultiheadAttention by DPMultiheadAttention and copies the weights.
#   With batch_first=False both give the same output. With batch_first=True the outputs of the heads
#   are put into other positions of the sequence, so the model computes something else, without an
#   error; where the number of examples is not the length, a mask of the right size is refused.
# Expected: the same output for the same weights.
# Instead: build such models with batch_first=False for Opacus, and compare the outputs once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
batch_first=False: the same output: True
batch_first=False, causal mask: the same output: True
batch_first=True: the same output: False
batch_first=True, causal mask: The size of the 2D attn_mask is not correct.
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from opacus.validators import ModuleValidator
from torch import nn

for batch_first in (False, True):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first).eval()
    fixed = ModuleValidator.fix(layer).eval()
    shape = (3, 5, 8) if batch_first else (5, 3, 8)  # 3 examples, 5 positions
    x = torch.randn(shape)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    for name, mask in (('', None), (', causal mask', causal)):
        try:
            same = torch.allclose(
                layer(x, x, x, attn_mask=mask)[0], fixed(x, x, x, attn_mask=mask)[0], atol=1e-5
            )
            print(f'batch_first={batch_first}{name}: the same output: {same}')
        except ValueError as error:
            print(f'batch_first={batch_first}{name}: {error}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

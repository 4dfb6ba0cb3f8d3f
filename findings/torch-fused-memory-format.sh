#!/usr/bin/env bash
# torch's fused optimizers update the wrong weights on a CPU if a gradient and its parameter differ
# in memory order.
#
# Packages: torch 2.13.0 (CPU build).
# Behaviour: with fused=True, SGD reads a gradient in its parameter's memory order whatever the
#   gradient's own strides are. A channels-last weight with a contiguous gradient, which torch
#   accepts as p.grad, gets each update in another place. Without fused=True the same step is right.
#   No error, no warning. Code that assembles gradients itself meets it, and fused AdamW is the
#   default of the transformers Trainer.
# Expected: the same update as without fused=True, or an error.
# Instead: give each gradient the strides of its parameter (torch.empty_like preserves them).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
torch.contiguous_format plain [0, 1, 2, 3, 4, 5, 6, 7]
torch.contiguous_format fused [0, 1, 2, 3, 4, 5, 6, 7]
torch.channels_last plain [0, 1, 2, 3, 4, 5, 6, 7]
torch.channels_last fused [0, 3, 6, 9, 1, 4, 7, 10]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch


def update(layout, fused):
    layer = torch.nn.Conv2d(3, 4, 2, bias=False).to(memory_format=layout)
    layer.weight.grad = torch.arange(48.0).reshape(4, 3, 2, 2)  # contiguous
    before = layer.weight.detach().clone()
    torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused).step()
    return (before - layer.weight.detach()).flatten()[:8].round().int().tolist()


for layout in (torch.contiguous_format, torch.channels_last):
    for fused in (False, True):
        print(layout, 'fused' if fused else 'plain', update(layout, fused))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

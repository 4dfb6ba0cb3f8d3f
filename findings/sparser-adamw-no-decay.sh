#!/usr/bin/env bash
# The weight decay of torch-optim-sparse's SparserAdamW has no effect.
#
# Packages: torch-optim-sparse 0.1.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: the rows with a gradient are read by a list of indices, which gives a copy, and the
#   copy is multiplied by 1 - lr * weight_decay and thrown away. The package asks for a torch below
#   2.0, which this Python does not have; a list of indices gives a copy in those too.
# Expected: the weights of torch.optim.AdamW for the rows with a gradient. Every row has one in
#   every step here, so that both ought to agree, as they do with a decay of 0.
# Why it matters here: the W in the name is this decay, and a model said to be regularized isn't.
# Instead: torch.optim.AdamW with dense gradients, or multiply the rows in place by weight[rows] =
#   weight[rows] * (1 - lr * weight_decay) before the step.
# Source: torch.optim.AdamW with the same gradients, dense; Loshchilov and Hutter, Decoupled Weight
#   Decay Regularization, 2019.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'torch-optim-sparse==0.1.3'
cat > expected.txt <<'EXPECTED'
decay 0: SparserAdamW 0.9831, AdamW 0.9831; the decay alone multiplies by 1.0000
decay 0.1: SparserAdamW 0.9831, AdamW 0.9635; the decay alone multiplies by 0.9802
decay 1: SparserAdamW 0.9831, AdamW 0.8036; the decay alone multiplies by 0.8179
decay 5: SparserAdamW 0.9831, AdamW 0.3512; the decay alone multiplies by 0.3585
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch_optim_sparse import SparserAdamW


def final(make, sparse, decay, steps=20):
    """Return the weights of an embedding after steps with the same gradients, 1 and -1 in turn."""
    embedding = torch.nn.Embedding(3, 2, sparse=sparse)
    torch.nn.init.constant_(embedding.weight, 1.0)
    optimizer = make(embedding.parameters(), lr=0.01, weight_decay=decay)
    for step in range(steps):
        optimizer.zero_grad()
        ((-1) ** step * embedding(torch.arange(3)).sum()).backward()
        optimizer.step()
    values = embedding.weight.detach()
    assert (values == values[0, 0]).all()
    return values[0, 0].item()


for decay in (0.0, 0.1, 1.0, 5.0):
    print(
        f'decay {decay:g}: SparserAdamW {final(SparserAdamW, True, decay):.4f}, AdamW {final(torch.optim.AdamW, False, decay):.4f};',
        f'the decay alone multiplies by {(1 - 0.01 * decay) ** 20:.4f}',
    )
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

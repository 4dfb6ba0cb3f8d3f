#!/usr/bin/env bash
# The momentum of torch-optim-sparse's SparserSGD never fades, so that its buffer is the sum of all
# gradients.
#
# Packages: torch-optim-sparse 0.1.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: the buffer's rows are read by a list of indices, which gives a copy, and the copy is
#   multiplied by the momentum and thrown away. The package asks for a torch below 2.0, which this
#   Python does not have; a list of indices gives a copy in those too. A momentum of 0.1 and of 0.9
#   move the weights alike.
# Expected: the momentum of torch.optim.SGD for the rows with a gradient. Every row has one in
#   every step here, so that both ought to agree exactly, as they do without momentum.
# Why it matters here: the steps grow with the number of steps, so the embedding training diverges,
#   and a search over the momentum compares equals.
# Instead: torch.optim.SGD with dense gradients, or without momentum for sparse ones.
# Source: torch.optim.SGD with the same gradients, dense, and the sum written out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'torch-optim-sparse==0.1.3'
cat > expected.txt <<'EXPECTED'
momentum 0: SparserSGD -5.0000, SGD -5.0000, by the definition -5.0000, by a buffer that only sums -27.5000
momentum 0.1: SparserSGD -27.5000, SGD -5.4938, by the definition -5.4938, by a buffer that only sums -27.5000
momentum 0.5: SparserSGD -27.5000, SGD -9.0010, by the definition -9.0010, by a buffer that only sums -27.5000
momentum 0.9: SparserSGD -27.5000, SGD -20.6905, by the definition -20.6905, by a buffer that only sums -27.5000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch_optim_sparse import SparserSGD


def final(make, sparse, momentum, steps=10):
    """Return the weights of an embedding after steps with a gradient of 1 everywhere."""
    embedding = torch.nn.Embedding(3, 2, sparse=sparse)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = make(embedding.parameters(), lr=0.5, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        embedding(torch.arange(3)).sum().backward()
        optimizer.step()
    values = embedding.weight.detach()
    assert (values == values[0, 0]).all()
    return values[0, 0].item()


for momentum in (0.0, 0.1, 0.5, 0.9):
    buffer, weight, summed, total = 0.0, 0.0, 0.0, 0.0
    for _ in range(10):
        buffer = momentum * buffer + 1
        weight -= 0.5 * buffer
        summed += 1
        total -= 0.5 * summed
    print(
        f'momentum {momentum:g}: SparserSGD {final(SparserSGD, True, momentum):.4f}, SGD {final(torch.optim.SGD, False, momentum):.4f},',
        f'by the definition {weight:.4f}, by a buffer that only sums {total:.4f}',
    )
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

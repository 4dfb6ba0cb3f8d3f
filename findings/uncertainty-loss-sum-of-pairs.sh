#!/usr/bin/env bash
# The divergence that uncertainty-loss adds to its loss is N times too large for a sum over N examples, and
# a table of N by N numbers where it is asked for each example's.
#
# Packages: uncertainty-loss 0.1.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: uniform_dirichlet_kl adds a column of N numbers to a row of N numbers, which makes a table in
#   which the terms of different examples are mixed. Its mean is the right one; its sum is N times the
#   right sum. evidential_loss with reduction='sum' regularises with N times reg_factor.
# Expected: one divergence for each example.
# Instead: reduction='mean', times the batch size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'uncertainty-loss==0.1.2'
cat > expected.txt <<'EXPECTED'
1 examples: mean 1.236 (right 1.236), sum 1.236 (right 1.236), added to the loss 1.236; shape for each example (1, 1)
8 examples: mean 0.766 (right 0.766), sum 49.003 (right 6.125), added to the loss 49.003; shape for each example (8, 8)
64 examples: mean 0.907 (right 0.907), sum 3715.388 (right 58.053), added to the loss 3715.388; shape for each example (64, 64)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch.distributions import Dirichlet, kl_divergence
from uncertainty_loss import evidential_loss, uniform_dirichlet_kl

torch.manual_seed(0)
for batch in (1, 8, 64):
    evidence, targets = 5 * torch.rand(batch, 3, dtype=torch.float64), torch.randint(3, (batch,))
    wrong = torch.nn.functional.one_hot(targets, 3)
    alpha = wrong + (1 - wrong) * (evidence + 1)
    right = kl_divergence(Dirichlet(alpha), Dirichlet(torch.ones_like(alpha)))
    shape = tuple(uniform_dirichlet_kl(evidence, targets, reduction='none').shape)
    total = uniform_dirichlet_kl(evidence, targets, reduction='sum').item()
    added = (evidential_loss(evidence, targets, reg_factor=1.0, reduction='sum')
             - evidential_loss(evidence, targets, reduction='sum')).item()
    print(f'{batch} examples: mean {uniform_dirichlet_kl(evidence, targets).item():.3f} (right {right.mean().item():.3f}), '
          f'sum {total:.3f} (right {right.sum().item():.3f}), added to the loss {added:.3f}; shape for each example {shape}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

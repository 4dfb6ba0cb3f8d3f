#!/usr/bin/env bash
# SGD-SaI gives a parameter of one number, such as the bias of a yes-or-no classifier, a learning
# rate that is millions of times too large.
#
# Packages: sgd-sai 1.0.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: the learning rate of each tensor is scaled by the norm of its first gradient, divided
#   by its standard deviation. The standard deviation of one number is NaN, which is turned into 0,
#   and the norm is divided by eps, 1e-8. Nothing warns.
# Expected: a scale of the order of 1, the root of the number of entries for a gradient of noise.
# Why it matters here: each model with one output has such a bias; the loss goes from 0.6 into the
#   thousands in one step.
# Instead: a second output, no bias in the last layer, or a group of parameters for
#   torch.optim.SGD.
# Source: Xu et al., No More Adam, Learning Rate Scaling at Initialization is All You Need, 2024.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'sgd-sai==1.0.3'
cat > expected.txt <<'EXPECTED'
1 output: scale of the learning rate of the bias 6.51e+06; losses 0.61 2118.26 2397.39
2 output: scale of the learning rate of the bias 1; losses 0.78 0.77 0.76
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import torch
from sgd_sai import SGD_sai

torch.manual_seed(0)
x = torch.randn(100, 3)
y = (x[:, 0] > 0).long()
losses = {1: lambda output: torch.nn.functional.binary_cross_entropy_with_logits(output[:, 0], y.float()),
          2: lambda output: torch.nn.functional.cross_entropy(output, y)}
for outputs, loss in losses.items():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, outputs)
    optimizer = SGD_sai(model.parameters(), lr=0.01)
    before, seen = model.bias.detach().clone(), []
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        seen.append(value.item())
        if not step:
            gradient = model.bias.grad.clone()
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.step()
        if not step:
            scale = ((before * (1 - 0.01 * 0.01) - model.bias.detach()) / (0.01 * gradient)).mean().item()
    print(f'{outputs} output: scale of the learning rate of the bias {scale:.3g}; losses', ' '.join(f'{value:.2f}' for value in seen))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

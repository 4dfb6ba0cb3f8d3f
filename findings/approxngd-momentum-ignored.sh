#!/usr/bin/env bash
# The K-FAC of approxngd computes its Adam-like momentum and never uses it: each momentum from 0 to
# 0.99 gives the same weights.
#
# Packages: approxngd 0.1.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: with momentum_type='adam' the gradients are added to velocities before they are
#   preconditioned, and the preconditioner is then applied to the gradients. The velocities are
#   kept up to date and do not enter the step.
# Expected: the preconditioned velocities, as in the optimizer of DeepMind that the package
#   follows: "adam" applies momentum before the preconditioner, "regular" after it.
# Why it matters here: the default momentum of 0.9 makes steps that are up to ten times as large,
#   so a learning rate that is tuned for one type is wrong for the other.
# Instead: momentum_type='regular'.
# Source: Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate
#   Curvature, ICML 2015.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'setuptools==80.9.0' 'wheel==0.45.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps '--no-build-isolation' 'approxngd==0.1.1'
cat > expected.txt <<'EXPECTED'
regular, momentum 0.0: losses 1.9369 1.9071 1.8235 1.7014
regular, momentum 0.5: losses 1.9369 1.8923 1.7435 1.5389
regular, momentum 0.9: losses 1.9369 1.8805 1.6217 1.2359
regular, momentum 0.99: losses 1.9369 1.8779 1.5849 1.1700
adam, momentum 0.0: losses 1.9369 1.9071 1.8235 1.7014
adam, momentum 0.5: losses 1.9369 1.9071 1.8235 1.7014
adam, momentum 0.9: losses 1.9369 1.9071 1.8235 1.7014
adam, momentum 0.99: losses 1.9369 1.9071 1.8235 1.7014
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from approxngd import KFAC

random = torch.Generator().manual_seed(0)
x, y = (torch.randn(20, size, generator=random, dtype=torch.float64) for size in (3, 2))


def train(kind, momentum):
    """Return the loss after 1, 2, 5 and 10 steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optimizer = KFAC(model, 0.05, 0.1, momentum=momentum, momentum_type=kind)
    losses = []
    for _ in range(11):
        model.zero_grad()
        with optimizer.track_forward():
            loss = ((model(x) - y) ** 2).sum(dim=1).mean()
        with optimizer.track_backward():
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return ' '.join(f'{losses[step]:.4f}' for step in (1, 2, 5, 10))


for kind in ('regular', 'adam'):
    for momentum in (0.0, 0.5, 0.9, 0.99):
        print(f'{kind}, momentum {momentum}: losses {train(kind, momentum)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# TSGD takes a learning rate and never uses it: 0.001 and 10 give the same training, at a rate of 0.1.
#
# Packages: tsgd 0.0.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: lr is documented as the learning rate, and the documented example sets it to 1e-3. The step
#   multiplies by a rate that falls from up_lr to low_lr, 0.1 and 0.005 by default. A scheduler of
#   torch.optim, which changes lr, changes nothing either.
# Expected: a step in proportion to lr, as with SGD.
# Instead: set up_lr and low_lr.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tsgd==0.0.2' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
lr 0.001: weights after 1, 10 and 100 steps 0.900000 -0.237112 -0.001369; torch.optim.SGD with momentum 0.999000 0.958979 0.368629
lr 0.1: weights after 1, 10 and 100 steps 0.900000 -0.237112 -0.001369; torch.optim.SGD with momentum 0.900000 -0.588789 0.003739
lr 10: weights after 1, 10 and 100 steps 0.900000 -0.237112 -0.001369
lr 0.1 that ExponentialLR multiplies by 0.5 in each step: weights after 1, 10 and 100 steps 0.900000 -0.237112 -0.001369
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from tsgd import TSGD


def train(make, decay=1.0):
    """Return the weight after 1, 10 and 100 steps on half of its square."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = make([weight])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    seen = []
    for _ in range(100):
        optimizer.zero_grad()
        (weight**2 / 2).sum().backward()
        optimizer.step()
        scheduler.step()
        seen.append(weight.item())
    return ' '.join(f'{seen[place]:.6f}' for place in (0, 9, 99))


for rate in (0.001, 0.1, 10):
    line = train(lambda weights: TSGD(weights, lr=rate, iters=100))
    plain = f'; torch.optim.SGD with momentum {train(lambda weights: torch.optim.SGD(weights, rate, 0.9))}'
    print(f'lr {rate}: weights after 1, 10 and 100 steps {line}{plain if rate < 1 else ""}')
line = train(lambda weights: TSGD(weights, lr=0.1, iters=100), decay=0.5)
print(f'lr 0.1 that ExponentialLR multiplies by 0.5 in each step: weights after 1, 10 and 100 steps {line}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

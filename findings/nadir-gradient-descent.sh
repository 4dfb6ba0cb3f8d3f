#!/usr/bin/env bash
# RMSProp and Adagrad of nadir are plain gradient descent: their classes hold no update of their own.
#
# Packages: nadir 0.1.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: RMSProp and Adagrad inherit the step of the base class, which subtracts the rate times the gradient.
#   RMSProp holds nothing else, Adagrad a function for its second moment that nothing calls. beta_2, eps and
#   adaptive=True are accepted and ignored. A gradient a thousand times as large makes a step a thousand times
#   as large, and with a rate that is right for RMSProp the weights leave at once.
# Expected: steps that do not depend on the scale of the gradients.
# Why it matters here: a comparison with "RMSProp" is one with gradient descent.
# Instead: torch's optimizers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'nadir==0.1.1' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
torch RMSprop, gradients times 1: weights -1.07 and -1.07, equal to gradient descent: False
torch RMSprop, gradients times 1000: weights -1.07 and -1.07, equal to gradient descent: False
nadir RMSProp, gradients times 1: weights -1.48 and -151.31, equal to gradient descent: True
nadir RMSProp, gradients times 1000: weights -1480.11 and -151310.48, equal to gradient descent: True
torch Adagrad, gradients times 1: weights -0.18 and -0.18, equal to gradient descent: False
torch Adagrad, gradients times 1000: weights -0.18 and -0.18, equal to gradient descent: False
nadir Adagrad, gradients times 1: weights -1.48 and -151.31, equal to gradient descent: True
nadir Adagrad, gradients times 1000: weights -1480.11 and -151310.48, equal to gradient descent: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import nadir
import torch


def run(make, scale):
    random = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.double))
    optimizer = make([weight])
    for _ in range(100):
        noise = 1 + torch.rand(2, dtype=torch.double, generator=random)
        weight.grad = scale * torch.tensor([1.0, 100.0], dtype=torch.double) * noise
        optimizer.step()
    return weight.detach()


plain = {scale: run(lambda weights: torch.optim.SGD(weights, lr=0.01), scale) for scale in (1, 1000)}
for name, make in (
        ('torch RMSprop', lambda weights: torch.optim.RMSprop(weights, lr=0.01, alpha=0.9)),
        ('nadir RMSProp', lambda weights: nadir.RMSProp(weights, nadir.RMSPropConfig(lr=0.01, beta_2=0.9))),
        ('torch Adagrad', lambda weights: torch.optim.Adagrad(weights, lr=0.01)),
        ('nadir Adagrad', lambda weights: nadir.Adagrad(weights, nadir.AdagradConfig(lr=0.01)))):
    for scale in (1, 1000):
        weight = run(make, scale)
        print(f'{name}, gradients times {scale}: weights {weight[0]:.2f} and {weight[1]:.2f}, '
              f'equal to gradient descent: {torch.equal(weight, plain[scale])}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# TSGD documents that its number of steps is computed from the size of the test set. With fewer test
# than training examples its learning rate is then negative for most of the training, which diverges.
#
# Packages: tsgd 0.0.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: README and docstring say iters = (testSampleSize / batchSize) * epoch. The learning rate is
#   a straight line from up_lr at step 0 to low_lr at step iters and goes on below 0: it is 0 at 1.05
#   of these steps by default, and -0.47 at the end of a training on 60,000 examples with a test set of
#   10,000. A negative rate climbs the loss.
# Expected: the number of training steps, as TAdam by the same author documents it, and low_lr from there on.
# Instead: iters = steps of an epoch * epochs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tsgd==0.0.2' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
iters from the test set, after epoch 1: loss 1.07, learning rate 0.0440
iters from the test set, after epoch 2: loss 1.06, learning rate -0.0130
iters from the test set, after epoch 3: loss 10, learning rate -0.0701
iters from the test set, after epoch 10: loss 2.11e+160, learning rate -0.4690
iters from the training set, after epoch 1: loss 1.07, learning rate 0.0907
iters from the training set, after epoch 2: loss 1.07, learning rate 0.0812
iters from the training set, after epoch 3: loss 1.07, learning rate 0.0717
iters from the training set, after epoch 10: loss 1.06, learning rate 0.0052
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from tsgd import TSGD

torch.manual_seed(0)
training, test, batch, epochs = 6000, 1000, 100, 10
inputs = torch.randn(training + test, 5, dtype=torch.float64)
outputs = inputs @ torch.arange(1.0, 6.0, dtype=torch.float64) + torch.randn(training + test, dtype=torch.float64)


def run(size):
    """Train on the documented number of steps, from the given number of examples; return losses and rates."""
    weights = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    probe = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))  # a gradient of 1: its step is the rate
    optimizer = TSGD([{'params': [weights]}, {'params': [probe], 'momentum': 1e-9}], lr=1e-3, iters=size / batch * epochs)
    seen = []
    for epoch in range(epochs):
        for start in range(0, training, batch):
            optimizer.zero_grad()
            rows = slice(start, start + batch)
            ((inputs[rows] @ weights - outputs[rows]) ** 2).mean().backward()
            before = probe.item()
            probe.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
            rate = before - probe.item()
        seen.append((((inputs[training:] @ weights - outputs[training:]) ** 2).mean().item(), rate))
    return seen


for name, size in (('test', test), ('training', training)):
    seen = run(size)
    for epoch in (1, 2, 3, 10):
        print(f'iters from the {name} set, after epoch {epoch}: loss {seen[epoch - 1][0]:.3g}, learning rate '
              f'{seen[epoch - 1][1]:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

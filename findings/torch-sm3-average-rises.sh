#!/usr/bin/env bash
# The moving average of torch-SM3 never falls: after one gradient of 100 its steps are a thirtieth of the
# right ones for ever.
#
# Packages: torch-sm3 0.1.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: with beta > 0 the optimizer documents an exponential moving average of squared gradients in
#   place of their sum. It averages, and then keeps the larger one of the old and the new average. One
#   large gradient, of the first step or a rare batch, divides all later steps, as a sum would not do
#   worse. The conditions are exchanged: the sum, for beta = 0, is replaced by the new value.
# Expected: an average that forgets: 0.9 of the old one and 0.1 of the new square, for beta = 0.9.
# Instead: clip the gradients, or RMSprop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch-sm3==0.1.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
gradients of 1 after one of 100, step 1: SM3 0.00333, with a moving average 0.00333
gradients of 1 after one of 100, step 10: SM3 0.00333, with a moving average 0.00535
gradients of 1 after one of 100, step 100: SM3 0.00333, with a moving average 0.09870
gradients of 1 after one of 100, step 1000: SM3 0.00333, with a moving average 0.10000
gradients of 1, step 1: SM3 0.22942, with a moving average 0.22942
gradients of 1, step 10: SM3 0.12072, with a moving average 0.12072
gradients of 1, step 100: SM3 0.10000, with a moving average 0.10000
gradients of 1, step 1000: SM3 0.10000, with a moving average 0.10000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from SM3 import SM3

for name, spike in (('gradients of 1 after one of 100', 100.0), ('gradients of 1', 1.0)):
    weights = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    # For a vector SM3 keeps one number per weight, so with a moving average it is RMSprop.
    optimizers = SM3(weights[:1], lr=0.1, beta=0.9), torch.optim.RMSprop(weights[1:], lr=0.1, alpha=0.9)
    for step in range(1001):
        before = [weight[0].item() for weight in weights]
        for weight in weights:
            weight.grad = torch.full_like(weight, spike if step == 0 else 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step in (1, 10, 100, 1000):
            steps = [start - weight[0].item() for start, weight in zip(before, weights)]
            print(f'{name}, step {step}: SM3 {steps[0]:.5f}, with a moving average {steps[1]:.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

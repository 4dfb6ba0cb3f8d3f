#!/usr/bin/env bash
# The speed limit of relativistic-adam stops the steps that respect it: one of 99.9 % of the limit becomes
# 4 % of it, one of 101 % becomes 77 %, and a layer of 9,999 weights takes 1 % of its first step.
#
# Packages: relativistic-adam 1.0.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: a step below the limit c is multiplied by sqrt(1 - (step / c)^2), which is 0 at the limit. From
#   the limit on it is c tanh(step / c). With the default rate of 0.001 and limit of 0.1, the first step of
#   Adam has a length of 0.001 times the root of the number of weights, which is the limit at 10,000: of
#   two layers that differ by two weights one stands still.
# Expected: larger steps for larger ones, up to the limit, as in the theory that it refers to, where a
#   momentum p has the speed p / sqrt(1 + p^2 / c^2).
# Instead: torch.optim.Adam with clipped gradients.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'relativistic-adam==1.0.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
one weight, limit 0.1, step of Adam 0.0100: RelativisticAdam 0.0099, in the theory 0.0100
one weight, limit 0.1, step of Adam 0.0500: RelativisticAdam 0.0433, in the theory 0.0447
one weight, limit 0.1, step of Adam 0.0900: RelativisticAdam 0.0392, in the theory 0.0669
one weight, limit 0.1, step of Adam 0.0990: RelativisticAdam 0.0140, in the theory 0.0704
one weight, limit 0.1, step of Adam 0.0999: RelativisticAdam 0.0045, in the theory 0.0707
one weight, limit 0.1, step of Adam 0.1010: RelativisticAdam 0.0766, in the theory 0.0711
one weight, limit 0.1, step of Adam 0.2000: RelativisticAdam 0.0964, in the theory 0.0894
5000 weights, default settings: RelativisticAdam moves by 0.05000, 71% of the step of Adam
9900 weights, default settings: RelativisticAdam moves by 0.00995, 10% of the step of Adam
9999 weights, default settings: RelativisticAdam moves by 0.00100, 1% of the step of Adam
10001 weights, default settings: RelativisticAdam moves by 0.07616, 76% of the step of Adam
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from relativistic_adam import RelativisticAdam


def first_step(optimizer, weights, rate):
    weight = torch.nn.Parameter(torch.zeros(weights, dtype=torch.float64))
    weight.grad = torch.ones(weights, dtype=torch.float64)
    optimizer([weight], lr=rate).step()
    return weight.detach().norm().item()


for rate in (0.01, 0.05, 0.09, 0.099, 0.0999, 0.101, 0.2):
    print(f'one weight, limit 0.1, step of Adam {first_step(torch.optim.Adam, 1, rate):.4f}: '
          f'RelativisticAdam {first_step(RelativisticAdam, 1, rate):.4f}, in the theory '
          f'{rate / (1 + (rate / 0.1) ** 2) ** 0.5:.4f}')
for weights in (5000, 9900, 9999, 10001):
    seen, adam = first_step(RelativisticAdam, weights, 0.001), first_step(torch.optim.Adam, weights, 0.001)
    print(f'{weights} weights, default settings: RelativisticAdam moves by {seen:.5f}, {seen / adam:.0%} of the step of Adam')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

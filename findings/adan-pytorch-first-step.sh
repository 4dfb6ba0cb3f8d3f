#!/usr/bin/env bash
# The first step of adan-pytorch moves nothing, and its bias correction counts it.
#
# Packages: adan-pytorch 0.1.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: the three moments are updated from the second step on, and stay 0 in the first one.
#   The correction that follows divides by 1 - (1 - beta)^k with the number k of all steps, one
#   more than the moments have seen, so that a constant gradient is corrected to about half of it
#   in the second step, in the numerator and under the root.
# Expected: the learning rate in each step for a gradient that never changes. Algorithm 1 of the
#   paper starts the moments with the first gradient and takes a step with them.
# Why it matters here: the first batch is not used, and a comparison of optimizers over few steps,
#   as in fine-tuning, is unfair.
# Instead: another implementation, such as torch.optim.NAdam, or a warm-up that begins at the
#   second step.
# Source: Xie et al., Adan, Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models,
#   2022.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'adan-pytorch==0.1.0'
cat > expected.txt <<'EXPECTED'
gradient 1 in each step: steps in learning rates 0.00 0.71 0.82 0.87 0.90 0.92
  by the algorithm of the paper 1.00 1.00 1.00 1.00 1.00 1.00
gradient 2 in the first step, then 1: steps in learning rates 0.00 0.46 0.63 0.76 0.82 0.86
  by the algorithm of the paper 1.00 0.96 0.95 0.95 0.95 0.94
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from adan_pytorch import Adan


def right(gradients, betas=(0.02, 0.08, 0.01)):
    """Return the steps of the paper's algorithm, moments started with the first gradient, over the learning rate."""
    m, v, n, last, steps = gradients[0], 0.0, gradients[0] ** 2, gradients[0], []
    for place, gradient in enumerate(gradients):
        if place:
            change = gradient - last
            m = (1 - betas[0]) * m + betas[0] * gradient
            v = (1 - betas[1]) * v + betas[1] * change
            n = (1 - betas[2]) * n + betas[2] * (gradient + (1 - betas[1]) * change) ** 2
        steps.append((m + (1 - betas[1]) * v) / n**0.5)
        last = gradient
    return steps


for label, gradients in (('1 in each step', [1.0] * 6), ('2 in the first step, then 1', [2.0] + [1.0] * 5)):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, seen, before = Adan([weight], lr=0.001), [], 0.0
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        seen.append((before - weight.item()) / 0.001)
        before = weight.item()
    print(f'gradient {label}: steps in learning rates', ' '.join(f'{step:.2f}' for step in seen))
    print('  by the algorithm of the paper', ' '.join(f'{step:.2f}' for step in right(gradients)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

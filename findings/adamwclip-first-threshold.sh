#!/usr/bin/env bash
# AdamWClip clips each gradient of its first step to 1e-10 and each later one until its threshold has grown
# from there to the size of the gradients: with its default settings these are 500 steps or so of a sign.
#
# Packages: AdamWClip 0.1.4, torch 2.13.0, numpy 2.4.6.
# Behaviour: the threshold is three times the root mean square of the clipped gradients so far, at least
#   1e-10. Before the first step there are none, so each entry is clipped to 1e-10, which eps=1e-8 then makes
#   a step of a hundredth. From there on the threshold grows slowly, and
#   meanwhile large and small gradients of a weight count the same. How long that lasts depends on the size of
#   the gradients, against "equivariant thresholds with respect to scaling the gradients" in its description.
# Expected: no clipping before there are statistics. The docstring names a warm-up of 10 steps and a smallest
#   threshold of 0.01 as defaults; they are 0 and 1e-10.
# Why it matters here: adaptive thresholds for clipping are what private training looks for.
# Instead: clip_grad_warm_up=10, for which the same weights follow AdamW.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'AdamWClip==0.1.4' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
AdamW, gradients of 0.001: first step 0.0100, steps in which each gradient is clipped 0 of 2000
AdamW, gradients of 1: first step 0.0100, steps in which each gradient is clipped 0 of 2000
AdamW, gradients of 1000: first step 0.0100, steps in which each gradient is clipped 0 of 2000
AdamWClip, gradients of 0.001: first step 0.0001, steps in which each gradient is clipped 100 of 2000
AdamWClip, gradients of 1: first step 0.0001, steps in which each gradient is clipped 490 of 2000
AdamWClip, gradients of 1000: first step 0.0001, steps in which each gradient is clipped 1480 of 2000
AdamWClip, warm-up 10, gradients of 0.001: first step 0.0100, steps in which each gradient is clipped 0 of 2000
AdamWClip, warm-up 10, gradients of 1: first step 0.0100, steps in which each gradient is clipped 0 of 2000
AdamWClip, warm-up 10, gradients of 1000: first step 0.0100, steps in which each gradient is clipped 0 of 2000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from AdamWClip import AdamWClip

STEPS = 2000


def run(make, scale):
    random = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(20, dtype=torch.double))
    optimizer, all_clipped, first = make([weight]), 0, None
    for step in range(STEPS):
        gradient = scale * (1 + torch.randn(20, generator=random, dtype=torch.double))
        weight.grad = gradient.clone()
        optimizer.step()
        all_clipped += bool((weight.grad.abs() < gradient.abs()).all())
        first = weight.detach().abs().mean().item() if first is None else first
    return first, all_clipped


for name, make in (
        ('AdamW', lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0)),
        ('AdamWClip', lambda weights: AdamWClip(weights, lr=0.01, weight_decay=0)),
        ('AdamWClip, warm-up 10', lambda weights: AdamWClip(weights, lr=0.01, weight_decay=0,
                                                            clip_grad_warm_up=10))):
    for scale in (0.001, 1, 1000):
        first, all_clipped = run(make, scale)
        print(f'{name}, gradients of {scale:g}: first step {first:.4f}, steps in which each gradient is '
              f'clipped {round(all_clipped, -1)} of {STEPS}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# Yogi of torchium makes all weights NaN in the first step with ordinary gradients: its second moment can only
# fall, and the root of a negative one follows.
#
# Packages: torchium 0.1.5, torch 2.13.0, numpy 2.4.6.
# Behaviour: Yogi adds (1 - beta2) sign(g^2 - v) g^2 to the second moment v. torchium subtracts
#   (1 - beta2) |g^2 - v|, which lowers v both where the gradient is larger and where it is smaller. v starts at
#   1e-6, so a gradient of 0.04 is enough for the first step, and one of 0.01 for the eleventh.
# Expected: the published update, whose v stays positive.
# Why it matters here: a model of NaN is found after the run, whose privacy is spent.
# Instead: Yogi of another package, or Adam.
# Source: Zaheer and others (2018), "Adaptive methods for nonconvex optimization", algorithm 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torchium==0.1.5' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
gradient 1.0: finite steps of 100: torchium 0, weight nan; published: weight -0.987
gradient 0.1: finite steps of 100: torchium 0, weight nan; published: weight -0.976
gradient 0.04: finite steps of 100: torchium 0, weight nan; published: weight -0.950
gradient 0.01: finite steps of 100: torchium 10, weight nan; published: weight -0.786
EXPECTED
TORCHIUM_SHOW_INFO=false env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import torch
from torchium.optimizers import Yogi


def run_published(gradient, steps, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-3):
    weight, first, second = 0.0, 0.0, 1e-6
    for step in range(1, steps + 1):
        first = beta1 * first + (1 - beta1) * gradient
        second -= (1 - beta2) * math.copysign(1, second - gradient**2) * gradient**2
        size = math.sqrt(second / (1 - beta2**step)) + eps
        weight -= lr / (1 - beta1**step) * first / size
    return weight


for gradient in (1.0, 0.1, 0.04, 0.01):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, finite = Yogi([weight]), 0
    for step in range(100):
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
        finite += bool(weight.isfinite().all())
    print(f'gradient {gradient}: finite steps of 100: torchium {finite}, weight {weight.item():.3f}; '
          f'published: weight {run_published(gradient, 100):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# K-FAC and Shampoo of torchium are gradient descent: K-FAC multiplies the gradient by a number, which becomes
# 40,000 at step 100, and Shampoo uses its matrices in each hundredth step.
#
# Packages: torchium 0.1.5, torch 2.13.0, numpy 2.4.6.
# Behaviour: KFAC(params) sees no activations and no gradients of outputs, which its source says. It averages
#   0.01 times the identity in their place and inverts that at steps 100, 200 and so on, so the direction is
#   the gradient's and the step grows at once. Shampoo computes its roots in each hundredth step
#   (update_freq=100) and uses them in that step alone; in the others it takes the gradient itself, which is
#   here a hundred times as long. No message says so.
# Expected: the Kronecker factors of the layer, and roots that are kept between two updates of them.
# Why it matters here: preconditioners are compared by such packages.
# Instead: packages that look at the layers, or that keep the roots.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torchium==0.1.5' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
KFAC: in the direction of the gradient 200 of 200 steps; size over the size of the gradient 1 at step 1, 1 at step 99, 3.98e+04 at step 100, 3.98e+04 at step 101, 1.82e+04 at step 200
Shampoo: in the direction of the gradient 198 of 200 steps; size over the size of the gradient 1 at step 1, 1 at step 99, 0.0111 at step 100, 1 at step 101, 0.00791 at step 200
EXPECTED
TORCHIUM_SHOW_INFO=false env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torchium.optimizers import KFAC, Shampoo

inputs = torch.randn(64, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
inputs *= torch.tensor([1, 1, 1, 10, 100])  # K-FAC and Shampoo would take other steps along the last two
targets = inputs[:, :3] + 1
for name, make in (('KFAC', lambda weights: KFAC(weights, lr=1e-9, momentum=0)),
                   ('Shampoo', lambda weights: Shampoo(weights, lr=1e-9))):
    layer = torch.nn.Linear(5, 3, bias=False, dtype=torch.double)
    torch.nn.init.zeros_(layer.weight)
    optimizer, sizes, same = make(layer.parameters()), {}, 0
    for step in range(1, 201):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(layer(inputs), targets).backward()
        before, gradient = layer.weight.detach().clone(), layer.weight.grad.clone()
        optimizer.step()
        moved = (before - layer.weight.detach()) / 1e-9
        cosine = torch.nn.functional.cosine_similarity(moved.flatten(), gradient.flatten(), dim=0)
        same += bool(cosine > 1 - 1e-6)
        sizes[step] = moved.norm() / gradient.norm()
    print(f'{name}: in the direction of the gradient {same} of 200 steps; size over the size of the gradient',
          ', '.join(f'{sizes[step]:.3g} at step {step}' for step in (1, 99, 100, 101, 200)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The inverse Hessian of pytorch-influence-functions makes one step of its recursion, whatever
# depth is asked for.
#
# Packages: pytorch-influence-functions 0.1.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: s_test repeats a step that takes the estimate so far and a product with the Hessian.
#   It gives the new estimate another name than the one that it goes on with, so each of the 5000
#   steps starts from the gradient again and the last one is returned: (2 - damp) times the
#   gradient less a Hessian product over the scale. The influences that are computed from it are
#   products of gradients, and the ranking of training examples that it reports knows next to
#   nothing of the curvature.
# Expected: an estimate that converges to the solution of (H / scale + damp) s = gradient, as the
#   README says that "greater recursion depth improves precision".
# Instead: the recursion by hand, as in this script, or conjugate gradients.
# Source: Koh and Liang, Understanding Black-box Predictions via Influence Functions, ICML 2017,
#   section 3; Agarwal, Bullins and Hazan, Second-Order Stochastic Optimization for Machine
#   Learning in Linear Time, JMLR 2017.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pytorch-influence-functions==0.1.1'
cat > expected.txt <<'EXPECTED'
depth 1: length 1.86 gradients, cosine with the gradient 0.999, with the solution 0.760; recursion by hand 1.86 and 0.760
depth 10: length 1.86 gradients, cosine with the gradient 0.999, with the solution 0.760; recursion by hand 6.32 and 0.900
depth 1000: length 1.86 gradients, cosine with the gradient 0.999, with the solution 0.760; recursion by hand 15.51 and 1.000
solution: 15.51 gradients
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import torch
from pytorch_influence_functions.influence_function import calc_loss, grad_z, s_test

torch.manual_seed(0)
x = torch.randn(200, 3, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.3])
y = (x[:, 0] + torch.randn(200) > 0).long()
model = torch.nn.Linear(3, 2, dtype=torch.float64)
damp, scale = 0.01, 5.0
flat = lambda parts: torch.cat([part.detach().flatten() for part in parts])
gradient = flat(grad_z(x[:1], y[:1], model))
shapes = [parameter.shape for parameter in model.parameters()]

def loss(vector):
    weight, bias = vector[:6].reshape(2, 3), vector[6:]
    return calc_loss(x @ weight.T + bias, y)

hessian = torch.autograd.functional.hessian(loss, flat(model.parameters()))
solution = torch.linalg.solve(hessian / scale + damp * torch.eye(8, dtype=torch.float64), gradient)
cosine = lambda vector, other: torch.nn.functional.cosine_similarity(vector, other, dim=0).item()
estimate, steps = gradient.clone(), 0
for depth in (1, 10, 1000):
    with contextlib.redirect_stdout(io.StringIO()):
        seen = flat(s_test(x[:1], y[:1], model, [(x, y)], damp=damp, scale=scale, recursion_depth=depth))
    while steps < depth:
        estimate, steps = gradient + (1 - damp) * estimate - hessian @ estimate / scale, steps + 1
    print(f'depth {depth}: length {seen.norm() / gradient.norm():.2f} gradients, cosine with the gradient {cosine(seen, gradient):.3f},',
          f'with the solution {cosine(seen, solution):.3f}; recursion by hand {estimate.norm() / gradient.norm():.2f} and {cosine(estimate, solution):.3f}')
print(f'solution: {solution.norm() / gradient.norm():.2f} gradients')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Gauss-Newton product of torch-secorder is 0 for every model and every vector.
#
# Packages: torch-secorder 0.0.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: gauss_newton_product detaches the output of the model to take the second derivative
#   of the loss, and then goes back from that detached output to the parameters. Nothing leads
#   there, allow_unused=True turns the missing gradients into zeros, and no error is raised. A
#   solver or a trace estimate that is built on it sees a flat loss.
# Expected: J^T H J v, for a linear model with squared loss the same as the Hessian.
# Why it matters here: damping alone is left of a preconditioner from such products.
# Instead: torch.func.jvp and torch.func.vjp of the model around the Hessian of the loss.
# Source: Schraudolph, Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent,
#   Neural Computation 2002.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'torch-secorder==0.0.1'
cat > expected.txt <<'EXPECTED'
linear, squared error: length of the product 0.00, by the Jacobian and the Hessian 1.92
linear, cross-entropy: length of the product 0.00, by the Jacobian and the Hessian 0.48
two layers, squared error: length of the product 0.00, by the Jacobian and the Hessian 1.08
two layers, cross-entropy: length of the product 0.00, by the Jacobian and the Hessian 0.50
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch_secorder.core import gauss_newton_product

torch.manual_seed(0)
x, y = torch.randn(20, 3), torch.randn(20, 2)
classes = torch.randint(0, 2, (20,))
models = {'linear': torch.nn.Linear(3, 2), 'two layers': torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))}
losses = {'squared error': (torch.nn.MSELoss(), y), 'cross-entropy': (torch.nn.CrossEntropyLoss(), classes)}

def right(model, loss, target, vector):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    output = model(x).detach()
    parts = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)).flatten())(weights)
    jacobian = torch.cat([parts[name].flatten(1) for name in weights], dim=1)
    curvature = torch.autograd.functional.hessian(lambda o: loss(o.reshape(output.shape), target), output.flatten())
    return [jacobian.T @ curvature @ jacobian @ torch.cat([part.flatten() for part in vector])]

for name, model in models.items():
    vector = [torch.randn_like(parameter) for parameter in model.parameters()]
    for kind, (loss, target) in losses.items():
        seen = gauss_newton_product(model, loss, x, target, vector)
        norm = lambda parts: torch.cat([part.flatten() for part in parts]).norm().item()
        print(f'{name}, {kind}: length of the product {norm(seen):.2f}, by the Jacobian and the Hessian {norm(right(model, loss, target, vector)):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

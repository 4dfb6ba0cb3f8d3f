#!/usr/bin/env bash
# The Fisher diagonals of torch-secorder square the gradient of the whole batch, so they are 0 for
# a model that is trained.
#
# Packages: torch-secorder 0.0.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: The Fisher information is the mean of the squared gradients of single examples.
#   empirical_fisher_diagonal squares the gradient of the mean loss, and
#   generalized_fisher_diagonal the gradient of the sum, which it calls exact. At a minimum the
#   gradients of the examples cancel and both are 0 where the Fisher information is largest
#   compared with them; before it the second grows with the square of the batch size.
# Expected: the sum over examples of squared gradients, divided by their number for the mean.
# Why it matters here: a preconditioner divides by it, and elsewhere takes the parameters with a
#   small value for unimportant ones.
# Instead: torch.func.vmap over torch.func.grad.
# Source: Martens, New Insights and Perspectives on the Natural Gradient Method, JMLR 2020,
#   section 11; Kunstner and others, Limitations of the Empirical Fisher Approximation, NeurIPS
#   2019, equation 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'torch-secorder==0.0.1'
cat > expected.txt <<'EXPECTED'
before training: empirical 0.0961, generalized 15373.8; mean of the squares 0.4935, sum 197.4
at the minimum: empirical 0.0000, generalized 0.0; mean of the squares 0.2110, sum 84.4
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch_secorder.approximations.fisher_diagonal import empirical_fisher_diagonal, generalized_fisher_diagonal

torch.manual_seed(0)
x = torch.randn(400, 1, dtype=torch.float64)
y = torch.bernoulli(torch.sigmoid(x[:, 0])).long()
model = torch.nn.Linear(1, 2, bias=False, dtype=torch.float64)
loss = torch.nn.CrossEntropyLoss()

def show(name):
    empirical = empirical_fisher_diagonal(model, loss, x, y)[0].sum().item()
    general = generalized_fisher_diagonal(model, model(x), y)[0].sum().item()
    single = 0.0
    for row, label in zip(x, y):
        gradient = torch.autograd.grad(loss(model(row[None]), label[None]), model.weight)[0]
        single += gradient.pow(2).sum().item() / len(x)
    print(f'{name}: empirical {empirical:.4f}, generalized {general:.1f}; mean of the squares {single:.4f}, sum {single * len(x):.1f}')

with torch.no_grad():
    model.weight.zero_()
show('before training')
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16)

def closure():
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    return value

optimizer.step(closure)
show('at the minimum')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

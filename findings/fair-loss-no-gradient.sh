#!/usr/bin/env bash
# The fairness term of fair-loss changes the value of the loss and not the training.
#
# Packages: fair-loss 0.5, torch 2.13.0, numpy 2.4.6.
# Behaviour: FairLoss adds the sum of the scores of all groups, divided by the smallest one, to a loss.
#   The scores are put into a torch.FloatTensor, which copies their numbers and cuts them from the model,
#   a differentiable score of the caller's as well. The gradient is the one of the loss alone. There is no
#   lambda and there are no weights, although both are in its formula.
# Expected: the gradient of the sum, as computed below.
# Why it matters here: the loss that is printed contains the fairness, so that nobody sees that it is not
#   trained.
# Instead: torch.stack in place of torch.FloatTensor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'fair-loss==0.5'
cat > expected.txt <<'EXPECTED'
mean squared error: 3.232, gradient -2.155, -1.758, -1.534
FairLoss: 5.576, gradient -2.155, -1.758, -1.534
the same formula: 5.576, gradient -1.688, -1.444, -2.020
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from fair_loss import FairLoss

torch.manual_seed(0)
torch.set_num_threads(1)
group = torch.arange(100) % 2
values = torch.randn(100, 3)
target = values.sum(dim=1, keepdim=True) + group[:, None]
model = torch.nn.Linear(3, 1)


def error(output, target):
    return ((output - target) ** 2).mean()


output = model(values)
fair = FairLoss(torch.nn.MSELoss(), group.unique(), error)(group, output, target)
plain = error(output, target)
scores = torch.stack([error(output[group == k], target[group == k]) for k in (0, 1)])
right = plain + scores.sum() / (scores.min() + 1e-7)
for name, loss in (('mean squared error', plain), ('FairLoss', fair), ('the same formula', right)):
    gradient = torch.autograd.grad(loss, model.weight, retain_graph=True)[0][0]
    print(f'{name}: {loss.item():.3f}, gradient', ', '.join(f'{value:.3f}' for value in gradient.tolist()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Dice loss of sadice is the same for the right and for the worst prediction, and has its minimum at
# a probability of one half: it unlearns what a model knows.
#
# Packages: sadice 0.1.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: SelfAdjDiceLoss puts (1 - p)^alpha p, p the probability of the right class, in place of p
#   into the Dice coefficient, with alpha = 1 by default. It is 0 at p = 0 and at p = 1, so the loss is
#   0.5 at both ends, and its gradient lowers each probability above 1/2. A classifier that is right for
#   all examples gives each of them a probability of 0.50 after more training.
# Expected: that alpha pushes down "the weight of easy examples", as its documentation says, and not the
#   examples; a factor without a gradient does.
# Instead: alpha=0, which is the Dice loss.
# Source: Li and others, Dice Loss for Data-imbalanced NLP Tasks, ACL 2020, section 3.4, whose formula
#   it takes at its word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'sadice==0.1.3'
cat > expected.txt <<'EXPECTED'
alpha 1.0, probability of the right class 0.002: loss 0.498, a step raises it
alpha 1.0, probability of the right class 0.119: loss 0.425, a step raises it
alpha 1.0, probability of the right class 0.881: loss 0.425, a step lowers it
alpha 1.0, probability of the right class 0.998: loss 0.498, a step lowers it
alpha 0.0, probability of the right class 0.002: loss 0.498, a step raises it
alpha 0.0, probability of the right class 0.998: loss 0.001, a step raises it
trained with cross-entropy: the mean probability of the right class is 0.96, 100 % right
trained with cross-entropy, then sadice: the mean probability of the right class is 0.50, 3 % right
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from sadice import SelfAdjDiceLoss


def report(alpha, logit):
    logits = torch.tensor([[logit, 0.0]], requires_grad=True)
    loss = SelfAdjDiceLoss(alpha=alpha)(logits, torch.tensor([0]))
    loss.backward()
    probability = torch.softmax(logits, 1)[0, 0].item()
    direction = 'raises' if logits.grad[0, 0] < 0 else 'lowers'
    print(f'alpha {alpha}, probability of the right class {probability:.3f}: loss {loss.item():.3f}, a step {direction} it')


for alpha, logits in ((1.0, (-6.0, -2.0, 2.0, 6.0)), (0.0, (-6.0, 6.0))):
    for logit in logits:
        report(alpha, logit)
torch.manual_seed(0)
inputs = torch.randn(500, 5)
targets = (inputs[:, 0] > 0).long()
model = torch.nn.Linear(5, 2)
for name, loss, steps in (('cross-entropy', torch.nn.CrossEntropyLoss(), 100),
                          ('cross-entropy, then sadice', SelfAdjDiceLoss(), 500)):
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    probabilities = torch.softmax(model(inputs), 1)[torch.arange(500), targets]
    print(f'trained with {name}: the mean probability of the right class is {probabilities.mean().item():.2f}, '
          f'{100 * (probabilities > 0.5).float().mean().item():.0f} % right')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

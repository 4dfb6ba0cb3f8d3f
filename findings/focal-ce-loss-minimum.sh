#!/usr/bin/env bash
# The focal loss of focal_ce_loss takes the cross-entropy for the probability: it is 0 where the right
# class has a probability of 37 %, and training with it ends at 6 % right where cross-entropy has 99 %.
#
# Packages: focal-ce-loss 0.0.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: documented is -alpha (1 - p)^gamma log(p). The classes compute (1 - ce)^gamma ce, where ce is
#   the cross-entropy itself, with each reduction and for both classes. It is 0 at ce = 1, and rises
#   from ce = 1 to ce = 1/3, so that a model which starts from chance, at ce = 0.69, climbs to ce = 1.
# Expected: a loss that falls as the probability of the right class rises.
# Instead: p = torch.exp(-torch.nn.functional.cross_entropy(..., reduction='none')).
# Source: Lin and others, Focal Loss for Dense Object Detection, ICCV 2017, equation 5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'focal-ce-loss==0.0.3' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
probability of the right class 0.9: BFCELoss 0.0211, focal loss 0.0003; a step raises the probability: True
probability of the right class 0.7: BFCELoss 0.0369, focal loss 0.0080; a step raises the probability: False
probability of the right class 0.5: BFCELoss 0.0163, focal loss 0.0433; a step raises the probability: False
probability of the right class 0.37: BFCELoss 0.0000, focal loss 0.0987; a step raises the probability: False
probability of the right class 0.1: BFCELoss 0.9767, focal loss 0.4663; a step raises the probability: True
trained with cross-entropy: 99 % right, cross-entropy 0.06
trained with FocalCELoss: 6 % right, cross-entropy 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from focal_ce_loss import BFCELoss, FocalCELoss

for probability in (0.9, 0.7, 0.5, 0.37, 0.1):
    value = torch.tensor([probability], dtype=torch.float64, requires_grad=True)
    loss = BFCELoss()(value, torch.ones(1, dtype=torch.float64))
    loss.backward()
    right = 0.25 * (1 - probability) ** 2 * -torch.tensor(probability).log().item()
    print(f'probability of the right class {probability}: BFCELoss {loss.item():.4f}, focal loss {right:.4f}; '
          f'a step raises the probability: {value.grad.item() < 0}')
torch.manual_seed(0)
inputs = torch.randn(200, 2)
targets = (inputs[:, 0] > 0).long()
for name, loss in (('cross-entropy', torch.nn.CrossEntropyLoss()), ('FocalCELoss', FocalCELoss(reduction='mean'))):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(500):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    correct = (model(inputs).argmax(1) == targets).float().mean().item()
    print(f'trained with {name}: {100 * correct:.0f} % right, cross-entropy '
          f'{torch.nn.functional.cross_entropy(model(inputs), targets).item():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The alpha of cbloss's focal loss weighs both classes alike, so it balances nothing.
#
# Packages: cbloss 0.2.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: FocalLoss documents alpha for the positive and 1 - alpha for the negative examples,
#   "the balance between positive and negative samples". It multiplies both by alpha. With 0.9, to
#   make a rare outcome count nine times as much, the share of the positive examples in the loss
#   is as small as without it; alpha is a factor of the learning rate.
# Expected: the formula of its documentation, which is the one of the paper.
# Instead: torchvision.ops.sigmoid_focal_loss, or weights of one's own with reduction='none'.
# Source: Lin and others, Focal Loss for Dense Object Detection, ICCV 2017, equation 5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cbloss==0.2.0'
cat > expected.txt <<'EXPECTED'
alpha 0.25: positive examples have 1.0% of the loss, by the documented formula 0.3%
alpha 0.5: positive examples have 1.0% of the loss, by the documented formula 1.0%
alpha 0.9: positive examples have 1.0% of the loss, by the documented formula 8.3%
alpha 0.99: positive examples have 1.0% of the loss, by the documented formula 50.0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from cbloss.loss import FocalLoss

target = torch.zeros(1000)
target[:10] = 1
logits = torch.zeros(1000)
for alpha in (0.25, 0.5, 0.9, 0.99):
    each = FocalLoss(num_classes=2, alpha=alpha, gamma=2, reduction='none')(logits, target)
    share = each[:10].sum() / each.sum()
    weight = torch.where(target == 1, alpha, 1 - alpha)
    right = weight * 0.5 ** 2 * torch.log(torch.tensor(2.0))
    print(f'alpha {alpha}: positive examples have {share:.1%} of the loss, by the documented formula',
          f'{right[:10].sum() / right.sum():.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Tversky part of unified-focal-loss-pytorch is computed pixel by pixel, where the classes
# that a pixel does not have count as missed whatever is predicted.
#
# Packages: unified-focal-loss-pytorch 0.1.2, torch 2.13.0, numpy 2.4.6, einops 0.8.2.
# Behaviour: SymmetricFocalTverskyLoss and AsymmetricFocalTverskyLoss, of which UnifiedFocalLoss
#   consists with the focal loss, ask for the Tversky index without a sum over the pixels. For a
#   class that a pixel does not have there is no true positive, so its index is 1e-8 over the
#   predicted probability, which is 0 for what a network predicts. Half of the loss for two
#   classes is nearly a constant: a prediction with 99 % at each pixel has a loss of 0.50 in place
#   of 0.01. False positives have less than 0.1 % of the gradient.
# Expected: the index of each class over all pixels, as TverskyLoss of the same package has it.
# Instead: TverskyLoss or FocalTverskyLoss of the package.
# Source: Yeung and others, Unified Focal Loss, Computerized Medical Imaging and Graphics 2022.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'einops==0.8.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'unified-focal-loss-pytorch==0.1.2'
cat > expected.txt <<'EXPECTED'
60.00% at each pixel: loss 0.659, with sums over the pixels 0.448 (TverskyLoss 0.448); share of the gradient for false positives 0.00000
90.00% at each pixel: loss 0.536, with sums over the pixels 0.126 (TverskyLoss 0.126); share of the gradient for false positives 0.00000
99.00% at each pixel: loss 0.504, with sums over the pixels 0.013 (TverskyLoss 0.013); share of the gradient for false positives 0.00047
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from unified_focal_loss.losses import SymmetricFocalTverskyLoss, TverskyLoss

torch.manual_seed(0)
truth = (torch.rand(4, 16, 16) < 0.2).long()
for probability in (0.6, 0.9, 0.99):
    right = torch.full((4, 16, 16), probability, dtype=torch.float64)
    predicted = torch.stack([torch.where(truth == k, right, 1 - right) for k in (0, 1)], dim=1).requires_grad_()
    pixel = SymmetricFocalTverskyLoss(gamma=0.0)(predicted, truth)
    gradient = torch.autograd.grad(pixel, predicted)[0]
    wrong = torch.stack([truth != k for k in (0, 1)], dim=1)
    share = gradient[wrong].abs().sum() / gradient.abs().sum()
    p, g = predicted.detach().transpose(0, 1).reshape(2, -1), torch.stack([(truth == k).flatten() for k in (0, 1)]).double()
    index = (p * g).sum(1) / ((p * g).sum(1) + 0.7 * ((1 - p) * g).sum(1) + 0.3 * (p * (1 - g)).sum(1))
    print(f'{probability:.2%} at each pixel: loss {pixel.item():.3f}, with sums over the pixels {(1 - index).mean().item():.3f}',
          f'(TverskyLoss {TverskyLoss()(predicted, truth).item():.3f}); share of the gradient for false positives {share.item():.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

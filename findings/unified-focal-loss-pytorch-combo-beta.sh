#!/usr/bin/env bash
# The beta of the combo loss of unified-focal-loss-pytorch has no effect.
#
# Packages: unified-focal-loss-pytorch 0.1.2, torch 2.13.0, numpy 2.4.6, einops 0.8.2.
# Behaviour: ComboLoss documents that a beta above 0.5 penalises false negatives more than false
#   positives. It adds beta and 1 - beta times the same cross-entropy, which is the cross-entropy.
#   A search over beta compares equal models, and a lesion that is missed costs as much as one
#   that is seen where none is.
# Expected: beta for the positive and 1 - beta for the negative part of the cross-entropy.
# Instead: class weights of torch.nn.functional.nll_loss.
# Source: Taghanaki and others, Combo Loss: Handling Input and Output Imbalance in Multi-Organ
#   Segmentation, 2019.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'einops==0.8.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'unified-focal-loss-pytorch==0.1.2'
cat > expected.txt <<'EXPECTED'
lesions missed, beta 0.1: loss 1.209, by the paper 0.163
lesions missed, beta 0.5: loss 1.209, by the paper 0.605
lesions missed, beta 0.9: loss 1.209, by the paper 1.047
lesions seen everywhere, beta 0.1: loss 1.198, by the paper 1.036
lesions seen everywhere, beta 0.5: loss 1.198, by the paper 0.599
lesions seen everywhere, beta 0.9: loss 1.198, by the paper 0.162
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from unified_focal_loss.losses import ComboLoss

torch.manual_seed(0)
truth = (torch.rand(1, 20, 20) < 0.5).long()
cases = {'lesions missed': torch.where(truth == 1, 0.1, 0.1), 'lesions seen everywhere': torch.where(truth == 1, 0.9, 0.9)}
for name, value in cases.items():
    value = value.double()
    predicted = torch.stack([1 - value, value], dim=1)
    for beta in (0.1, 0.5, 0.9):
        seen = ComboLoss(alpha=1.0, beta=beta)(predicted, truth).item()
        t = truth.double()
        right = -(beta * t * value.log() + (1 - beta) * (1 - t) * (1 - value).log()).mean().item()
        print(f'{name}, beta {beta}: loss {seen:.3f}, by the paper {right:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# torchmetrics passes scores outside 0 to 1 through a sigmoid: an AUROC becomes 0.5, or depends on
# the batches.
#
# Packages: torchmetrics 1.9.0, torch 2.13.0 (CPU), scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: if any score of a call is below 0 or above 1, all of that call pass through a sigmoid
#   in float32. From about 17 on they all become 1, hence tied: the AUROC is 0.5. Where scores come
#   in batches, one batch is transformed and the next is not, and their order changes.
# Expected: the AUROC depends on the order of the scores only, as in scikit-learn.
# Instead: scikit-learn's roc_auc_score; or ranks divided by their number, as scores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torchmetrics==1.9.0' 'torch==2.13.0' 'scikit-learn==1.9.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
score + 0: scikit-learn 0.772, torchmetrics 0.772, one by one 0.734
score + 10: scikit-learn 0.772, torchmetrics 0.772, one by one 0.772
score + 30: scikit-learn 0.772, torchmetrics 0.500, one by one 0.500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import BinaryAUROC

generator = torch.Generator().manual_seed(0)
member = torch.randint(2, (2000,), generator=generator)
score = torch.randn(2000, generator=generator) + member
for shift in (0, 10, 30):
    scores = score + shift
    whole, batches = BinaryAUROC(), BinaryAUROC()
    whole.update(scores, member)
    for one, label in zip(scores.split(1), member.split(1)):
        batches.update(one, label)
    print(
        f'score + {shift}: scikit-learn {roc_auc_score(member, scores):.3f},',
        f'torchmetrics {whole.compute():.3f}, one by one {batches.compute():.3f}',
    )
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

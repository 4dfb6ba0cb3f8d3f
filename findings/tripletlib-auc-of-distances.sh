#!/usr/bin/env bash
# The area under the curve of tripletlib is 0 for a perfect embedding and 1 for an inverted one: it takes
# the distance of a pair for its likeness.
#
# Packages: tripletlib 0.1.1, torch 2.13.0, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1, tqdm 4.67.1.
# Behaviour: compute_auc_from_triplets labels pairs of one class 1 and pairs of two classes 0, and gives
#   their distances as scores. The better the model, the smaller are the distances of class 1. fit reports
#   it as aucs_train and aucs_val, which fall towards 0 as training goes on. The equal error rate beside
#   it is turned round at the end and right.
# Expected: 1 for an embedding in which each anchor is closer to each positive than to any negative one.
# Instead: 1 - aucs_val.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tripletlib==0.1.1' 'torch==2.13.0' 'numpy==2.4.6' \
  'scipy==1.17.1' 'scikit-learn==1.9.1' 'tqdm==4.67.1'
cat > expected.txt <<'EXPECTED'
perfect: AUC 0.000, share of the pairs of pairs in the right order 1.000, equal error rate 0.000
inverted: AUC 1.000, share of the pairs of pairs in the right order 0.000, equal error rate 1.000
at random: AUC 0.500, share of the pairs of pairs in the right order 0.500, equal error rate 0.480
good: AUC 0.113, share of the pairs of pairs in the right order 0.887, equal error rate 0.205
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from tripletlib.evaluation_utils import compute_auc_from_triplets, compute_eer_from_triplets

torch.manual_seed(0)
anchors = torch.randn(200, 4)
near, far = anchors + 0.1 * torch.randn(200, 4), anchors + 5
between = anchors + torch.randn(200, 4)
for name, positive, negative in (('perfect', near, far), ('inverted', far, near),
                                 ('at random', between, anchors + torch.randn(200, 4)),
                                 ('good', between, anchors + 2 * torch.randn(200, 4))):
    own, other = (anchors - positive).norm(dim=1), (anchors - negative).norm(dim=1)
    right = (own[:, None] < other[None, :]).float().mean().item()
    print(f'{name}: AUC {compute_auc_from_triplets(anchors, positive, negative):.3f}, share of the pairs of pairs in the '
          f'right order {right:.3f}, equal error rate {compute_eer_from_triplets(anchors, positive, negative)[0]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# toad turns an AUC round as soon as one of the scores is above 1.
#
# Packages: toad 0.1.7, scikit-learn 1.9.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: AUC takes any score or probability. If the largest one is above 1, it is taken for the
#   points of a score card, where more is better, and the order is reversed. The logits of a model
#   thus have an AUC of 0.76 in a group whose largest is 0.98 and of 0.24 in all clients; one
#   client with a logit above 1 decides. KS of the same package does not depend on it.
# Expected: one meaning for one argument, as in scikit-learn, or a parameter for points.
# Instead: roc_auc_score of scikit-learn, or pass probabilities only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'toad==0.1.7' 'scikit-learn==1.9.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
logits up to 1: 4964 clients, largest 0.98; AUC of toad 0.76, of scikit-learn 0.76; KS of toad 0.39
all logits: 5000 clients, largest 2.48; AUC of toad 0.24, of scikit-learn 0.76; KS of toad 0.39
probabilities: AUC of toad 0.76, in percent 0.24
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from sklearn.metrics import roc_auc_score
from toad.metrics import AUC, KS

random = np.random.default_rng(0)
default = random.random(5000) < 0.2
logit = random.normal(-2, 1, size=5000) + default
below = logit <= 1
for name, rows in (('logits up to 1', below), ('all logits', np.full(5000, True))):
    scores, labels = logit[rows], default[rows].astype(int)
    print(f'{name}: {rows.sum()} clients, largest {scores.max():.2f}; AUC of toad',
          f'{AUC(scores, labels):.2f}, of scikit-learn {roc_auc_score(labels, scores):.2f};',
          f'KS of toad {KS(scores, labels):.2f}')
probability = 1 / (1 + np.exp(-logit))
print(f'probabilities: AUC of toad {AUC(probability, default.astype(int)):.2f},',
      f'in percent {AUC(100 * probability, default.astype(int)):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

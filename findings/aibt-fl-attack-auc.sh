#!/usr/bin/env bash
# The area under the curve that the membership attack of aibt-fl returns is always 0.5, the value
# of perfect privacy.
#
# Packages: aibt-fl 1.0.0, torch 2.13.0, scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: attack documents two results, the probabilities of membership and "auc: Area under ROC
#   curve". The second is the constant 0.5, with a comment in the source that the truth would be
#   needed for it.
# Expected: the area for the people that it is given, an argument for the truth, or no second
#   result.
# Why it matters here: 0.5 is what a private model has, so a report of it certifies any model.
# Instead: sklearn.metrics.roc_auc_score with the first result, or the return value of
#   train_attack_model.
# Source: Shokri et al., Membership Inference Attacks against Machine Learning Models, IEEE S&P
#   2017, which the class names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'scikit-learn==1.9.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'aibt-fl==1.0.0'
cat > expected.txt <<'EXPECTED'
untrained model: area returned by attack 0.50, of the chances that it returns 0.49, by train_attack_model 0.44
model that knows its members by heart: area returned by attack 0.50, of the chances that it returns 0.86, by train_attack_model 0.90
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import torch
from aibt.metrics import MembershipInferenceAttack
from sklearn.metrics import roc_auc_score

random = np.random.default_rng(0)
torch.manual_seed(0)
x, y = random.normal(size=(400, 20)).astype(np.float32), random.integers(0, 2, 400)  # nothing to learn but by heart
members, others = slice(0, 200), slice(200, 400)
for label, epochs in (('untrained model', 0), ('model that knows its members by heart', 300)):
    model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.ReLU(), torch.nn.Linear(200, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.tensor(x[members])), torch.tensor(y[members])).backward()
        optimizer.step()
    attack = MembershipInferenceAttack(model)
    held = attack.train_attack_model((x[members], y[members]), (x[others], y[others]))
    chances, area = attack.attack(x, y)
    right = roc_auc_score(np.arange(400) < 200, chances)
    print(f'{label}: area returned by attack {area:.2f}, of the chances that it returns {right:.2f}, by train_attack_model {held:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# valda trains a PyTorch model on where it should begin anew: each fit continues from the one
# before.
#
# Packages: valda 0.1.10, torch 2.13.0, scikit-learn 1.9.1, numpy 2.4.6, tqdm 4.67.1.
# Behaviour: PytorchClassifier keeps the state_dict of the new model to load it before each fit.
#   The tensors in it are the ones of the model, which training changes, so that loading it changes
#   nothing. The state of the optimizer stays too.
# Expected: the initial weights before each fit, as the line that loads them intends, and as
#   scikit-learn's classifiers do.
# Why it matters here: each value then measures how far the training has come, and not what the
#   example is worth.
# Instead: a class of one's own that keeps copy.deepcopy(model.state_dict()) and makes a new
#   optimizer in fit.
# Source: Ghorbani and Zou, Data Shapley, ICML 2019, whose utility is the performance of a model
#   that is trained on a subset.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'scikit-learn==1.9.1' 'numpy==2.4.6' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'valda==0.1.10'
cat > expected.txt <<'EXPECTED'
loss before any training 1.018
fit 1 of the same two epochs on the same table: loss 0.652, from the first weights 0.653
fit 2 of the same two epochs on the same table: loss 0.500, from the first weights 0.654
fit 3 of the same two epochs on the same table: loss 0.429, from the first weights 0.654
fit 4 of the same two epochs on the same table: loss 0.389, from the first weights 0.654
fit 5 of the same two epochs on the same table: loss 0.363, from the first weights 0.654
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import copy

import numpy as np
import torch
from valda.pyclassifier import PytorchClassifier

torch.manual_seed(0)
random = np.random.default_rng(0)
x = random.normal(size=(64, 3)).astype(np.float32)
y = (x[:, 0] + 0.5 * random.normal(size=64) > 0).astype(np.int64)
model = torch.nn.Linear(3, 2)
first = copy.deepcopy(model.state_dict())
classifier = PytorchClassifier(model, optim=torch.optim.SGD(model.parameters(), lr=0.1), epochs=2)


def loss(trained):
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(trained(torch.tensor(x)), torch.tensor(y)).item()


def anew():
    """Return the loss after a training of two epochs from the first weights."""
    fresh = torch.nn.Linear(3, 2)
    fresh.load_state_dict(first)
    PytorchClassifier(fresh, optim=torch.optim.SGD(fresh.parameters(), lr=0.1), epochs=2).fit(x, y)
    return loss(fresh)


print(f'loss before any training {loss(model):.3f}')
for number in range(1, 6):
    torch.manual_seed(number)
    classifier.fit(x, y)
    seen = loss(model)
    torch.manual_seed(number)
    print(f'fit {number} of the same two epochs on the same table: loss {seen:.3f}, from the first weights {anew():.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

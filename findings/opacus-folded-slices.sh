#!/usr/bin/env bash
# Opacus clips each slice of a patient by itself where a model folds slices into the batch.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: a common way to classify a stack of slices (or the sentences of a text) is one network
#   over all slices, x.flatten(0, 1), and a mean of its outputs. Each weight then has one
#   grad_sample a slice, not a patient. Opacus accepts the model, clips the rows one by one, and
#   adds them: one patient of 16 slices contributes 16 times max_grad_norm to the sum, and the noise
#   is made for one. Where only a part of the network sees folded rows, it raises an error.
# Expected: an error where the rows of grad_sample are more than the examples of the batch.
# Instead: compare len(parameter.grad_sample) with the number of examples once; loop over slices, or
#   use a layer that takes them as an axis of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
1 slices: rows of grad_sample 1, norm of the contribution 0.010, max_grad_norm 0.01
16 slices: rows of grad_sample 16, norm of the contribution 0.160, max_grad_norm 0.01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):  # patients, slices, features
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)


for slices in (1, 16):
    torch.manual_seed(0)
    model = Slices()
    data = TensorDataset(torch.randn(1, 1, 4).expand(1, slices, 4), torch.zeros(1, dtype=torch.long))
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=1), noise_multiplier=0.0, max_grad_norm=0.01,
        loss_reduction='sum',
    )
    x, y = data[:]
    nn.CrossEntropyLoss(reduction='sum')(private(x), y).backward()
    rows = {len(p.grad_sample) for p in model.parameters()}
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.step()
    moved = (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm()
    print(f'{slices} slices: rows of grad_sample', *rows, end=', ')
    print(f'norm of the contribution {moved:.3f}, max_grad_norm 0.01')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

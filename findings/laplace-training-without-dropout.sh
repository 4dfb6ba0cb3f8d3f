#!/usr/bin/env bash
# The marginal-likelihood training of laplace-torch trains without dropout, and with frozen batch statistics,
# from its first update of the prior on, which by default is the end of the first epoch.
#
# Packages: laplace-torch 0.3, torch 2.13.0, asdfghjkl 0.1a4, backpack-for-pytorch 1.7.1,
#   curvlinops-for-pytorch 3.0.1, torchmetrics 1.9.0, numpy 2.4.6.
# Behaviour: marglik_training fits a Laplace approximation after each epoch, for which the model is put into
#   evaluation mode, and goes on with the training of the weights without leaving that mode.
# Expected: the mode in which the model was given, for each training step.
# Why it matters here: the prior is chosen for a network that overfits more than the one that was asked for;
#   curvature of a model in training is what our optimizers use.
# Instead: an optimizer whose zero_grad also calls model.train(), as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'torchmetrics==1.9.0' 'tqdm==4.70.1' 'opt_einsum==3.4.0' 'einops==0.8.2' 'linear_operator==0.6.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'laplace-torch==0.3' 'asdfghjkl==0.1a4' 'backpack-for-pytorch==1.7.1' 'curvlinops-for-pytorch==3.0.1' 'einconv==0.1.0' 'unfoldNd==0.2.3'
cat > expected.txt <<'EXPECTED'
share of hidden units that Dropout(0.5) drops in the training steps of each epoch
default: 0.5 0.0 0.0 0.0 0.0 0.0 0.0 0.0
prior from epoch 4 on: 0.5 0.5 0.5 0.5 0.0 0.0 0.0 0.0
prior each third epoch: 0.5 0.5 0.5 0.0 0.0 0.0 0.0 0.0
default, and model.train() before each step: 0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from laplace import marglik_training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 8


def run(in_training_mode, **settings):
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    labels = (inputs[:, 0] > 0).long()
    dropout = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), dropout, nn.Linear(64, 2))
    dropped, seen = [], []
    dropout.register_forward_hook(
        lambda module, given, returned: seen.append((returned == 0).float().mean().item()))

    class Recorder(torch.optim.Adam):
        def zero_grad(self, set_to_none=True):
            if in_training_mode:
                model.train()
            super().zero_grad(set_to_none)

        def step(self, closure=None):
            dropped.append(seen[-1])
            return super().step(closure)

    loader = DataLoader(TensorDataset(inputs, labels), batch_size=64)
    marglik_training(model, loader, likelihood='classification', hessian_structure='diag', n_epochs=EPOCHS,
                     n_hypersteps=2, optimizer_cls=Recorder, progress_bar=False, **settings)
    shares = torch.tensor(dropped).reshape(EPOCHS, -1).mean(1)
    return ' '.join(f'{share:.1f}' for share in shares.tolist())


print('share of hidden units that Dropout(0.5) drops in the training steps of each epoch')
print('default:', run(False))
print('prior from epoch 4 on:', run(False, n_epochs_burnin=4))
print('prior each third epoch:', run(False, marglik_frequency=3))
print('default, and model.train() before each step:', run(True))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The K-FAC of approxngd takes the gradients of the mean loss for gradients of examples in
# convolutions, and not in linear layers.
#
# Packages: approxngd 0.1.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: the hook of a linear layer multiplies the gradients of its outputs by the batch size,
#   which turns the gradients of a mean loss into those of the single examples. The hook of a
#   convolution does not, so that the covariance of its gradients is N squared times too small for
#   N examples.
# Expected: the mean of the squared gradients of single examples, which does not change where all
#   examples are repeated.
# Why it matters here: damping alone is left of the preconditioner of convolutions at a batch of
#   100, and a larger batch makes their steps larger against those of linear layers.
# Instead: multiply the loss by the batch size where the model has convolutions only.
# Source: Grosse and Martens, A Kronecker-factored Approximate Fisher Matrix for Convolution
#   Layers, ICML 2016.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'setuptools==80.9.0' 'wheel==0.45.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps '--no-build-isolation' 'approxngd==0.1.1'
cat > expected.txt <<'EXPECTED'
linear layer, 10 examples: trace of the covariance of the gradients 0.827, one example at a time 0.827
linear layer, 100 examples: trace of the covariance of the gradients 0.827, one example at a time 0.827
linear layer, 1000 examples: trace of the covariance of the gradients 0.827, one example at a time 0.827
convolution of 1 x 1, 10 examples: trace of the covariance of the gradients 0.00827, one example at a time 0.827
convolution of 1 x 1, 100 examples: trace of the covariance of the gradients 8.27e-05, one example at a time 0.827
convolution of 1 x 1, 1000 examples: trace of the covariance of the gradients 8.27e-07, one example at a time 0.827
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from approxngd import KFAC

images = torch.randn(10, 1, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
layers = {'linear layer': lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2), torch.nn.Tanh()),
          'convolution of 1 x 1': lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten(), torch.nn.Tanh())}
for name, make in layers.items():
    for copies in (1, 10, 100):
        torch.manual_seed(0)
        model = make().double()
        optimizer = KFAC(model, 0.1, 0.1)
        x = images.repeat(copies, 1, 1, 1)
        with optimizer.track_forward():
            loss = (model(x) ** 2).sum(dim=1).mean()
        with optimizer.track_backward():
            loss.backward()
        optimizer.update_cov()
        seen = torch.trace(optimizer.covariances[0][1]).item()
        right = 0.0
        for row in x:  # the gradient of the outputs of the layer, one example at a time
            inner = torch.nn.functional.linear(row.reshape(1, 1), [p for p in model.parameters()][0].reshape(2, 1), [p for p in model.parameters()][1]).detach().requires_grad_()
            right += torch.autograd.grad((torch.tanh(inner) ** 2).sum(), inner)[0].square().sum().item() / len(x)
        print(f'{name}, {len(x)} examples: trace of the covariance of the gradients {seen:.3g}, one example at a time {right:.3g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

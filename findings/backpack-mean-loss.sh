#!/usr/bin/env bash
# BackPACK's norms and variance of per-example gradients shrink with the batch size under a mean
# loss.
#
# Packages: backpack-for-pytorch 1.7.1, torch 2.13.0 (CPU), numpy 2.4.6.
# Behaviour: BatchGrad, BatchL2Grad, SumGradSquared and Variance are those of the terms of the mean,
#   each an example's gradient divided by N. A clip at norm C then clips nothing in a large batch,
#   and a noise scale from Variance is N² times too small. The second order extensions
#   (DiagGGNExact) keep the scale of the mean.
# Expected: the gradients of the examples, as from Opacus or torch.func, whatever the reduction.
# Instead: a loss with reduction='sum', and the division afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'backpack-for-pytorch==1.7.1' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
one by one: norm of the first example 1.6051, variance 3.424017
sum, batch 16: norm 1.6051, variance 4.110528
sum, batch 64: norm 1.6051, variance 3.424017
mean, batch 16: norm 0.1003, variance 0.016057
mean, batch 64: norm 0.0251, variance 0.000836
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from backpack import backpack, extend
from backpack.extensions import BatchL2Grad, Variance

torch.manual_seed(0)
model = extend(torch.nn.Linear(5, 3))
examples, labels = torch.randn(64, 5), torch.randint(3, (64,))
gradients = []
for one, label in zip(examples, labels):
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(one), label).backward()
    gradients.append(model.weight.grad.clone())
gradients = torch.stack(gradients)
norm, variance = gradients.flatten(1).norm(dim=1)[0], gradients.var(0, correction=0).sum()
print(f'one by one: norm of the first example {norm:.4f}, variance {variance:.6f}')
for reduction in ('sum', 'mean'):
    for size in (16, 64):
        loss = extend(torch.nn.CrossEntropyLoss(reduction=reduction))
        model.zero_grad()
        with backpack(BatchL2Grad(), Variance()):
            loss(model(examples[:size]), labels[:size]).backward()
        norm, variance = model.weight.batch_l2[0].sqrt(), model.weight.variance.sum()
        print(f'{reduction}, batch {size}: norm {norm:.4f}, variance {variance:.6f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

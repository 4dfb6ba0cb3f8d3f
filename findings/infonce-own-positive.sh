#!/usr/bin/env bash
# The supervised loss of infonce counts each example as a positive one of similarity 0, so unlike
# examples of a class are not drawn together.
#
# Packages: infonce 0.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: SupervisedInfoNCE masks the pairs of other classes with -1000 and multiplies the rest
#   by a mask. The example itself is in neither mask: its similarity becomes 0, and stays in both
#   sums as exp(0). At a temperature of 0.07 a positive pair with a cosine of -0.5 adds exp(-7)
#   beside it, so the loss hardly depends on the pair and its gradient is 1/1000 of the right one.
#   Pairs that are already alike get the whole gradient.
# Expected: sums over other examples only; the gradient of the cosine of the only positive pair is
#   -1/temperature whatever the cosine.
# Instead: mask the diagonal with -infinity before both sums.
# Source: Khosla and others, Supervised Contrastive Learning, NeurIPS 2020, equation 2, where A(i)
#   is all indices but i.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'infonce==0.3'
cat > expected.txt <<'EXPECTED'
cosine of the pair -0.9: gradient 0.0000, without the example itself -7.1429
cosine of the pair -0.5: gradient -0.0056, without the example itself -7.1429
cosine of the pair 0.0: gradient -3.5714, without the example itself -7.1429
cosine of the pair 0.5: gradient -7.1372, without the example itself -7.1429
cosine of the pair 0.9: gradient -7.1428, without the example itself -7.1429
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from infonce import SupervisedInfoNCE

loss = SupervisedInfoNCE(temperature=0.07)
target = torch.tensor([0, 0, 1, 1])

def slope(function, cosine):
    cosine = torch.tensor(cosine, dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    first = torch.stack([one, zero, zero])
    second = torch.stack([cosine, torch.sqrt(1 - cosine ** 2), zero])
    other = torch.stack([zero, zero, one])
    function(torch.stack([first, second, other, other])).backward()
    return cosine.grad.item()

def right(features):
    similarity = features @ features.T / 0.07
    result = 0
    for i in range(4):
        positive = torch.stack([similarity[i, j] for j in range(4) if j != i and target[j] == target[i]])
        negative = torch.stack([similarity[i, j] for j in range(4) if target[j] != target[i]])
        result = result - (positive.logsumexp(0) - negative.logsumexp(0)) / 4
    return result

for cosine in (-0.9, -0.5, 0.0, 0.5, 0.9):
    print(f'cosine of the pair {cosine}: gradient {slope(lambda x: loss(x, target), cosine):.4f},'.replace('-0.0000', '0.0000'),
          f'without the example itself {slope(right, cosine):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The angular losses of perte do not normalise the weights of the classes: with longer weights of the same
# angles ArcFace is 23 in place of 16 and then infinite, and CosFace NaN.
#
# Packages: perte 0.1.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: AngularPenaltySMLoss normalises the inputs, and its loop over the weights assigns each
#   normalised matrix to a local name. What it then takes for a cosine is the cosine times the length of
#   the weights. It is clamped to 1, where it has no gradient, and multiplied by 30 in the exponent, so
#   that it overflows.
# Expected: the same loss for each length of the weights, as in the papers that it refers to.
# Instead: normalise fc.weight before each call.
# Source: Deng and others, ArcFace, arXiv:1801.07698, equation 2, where the weights have length 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'perte==0.1.3' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
arcface, weights of length 0.5: 13.16, right 16.16
arcface, weights of length 1: 16.16, right 16.16
arcface, weights of length 2: 22.56, right 16.16
arcface, weights of length 10: inf, right 16.16
cosface, weights of length 0.5: 13.59, right 17.15
cosface, weights of length 1: 17.15, right 17.15
cosface, weights of length 2: 25.79, right 17.15
cosface, weights of length 10: nan, right 17.15
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from perte import AngularPenaltySMLoss

torch.manual_seed(0)
inputs, targets = torch.randn(30, 4), torch.arange(30) % 3
directions = torch.nn.functional.normalize(torch.randn(3, 4))


def right(kind):
    """Compute the loss from angles: the margin is 0.4 and the scale 30, as by default."""
    cosines = torch.nn.functional.normalize(inputs) @ directions.T
    own = torch.nn.functional.one_hot(targets, 3).bool()
    moved = torch.cos(torch.acos(cosines) + 0.4) if kind == 'arcface' else cosines - 0.4
    return torch.nn.functional.cross_entropy(30 * torch.where(own, moved, cosines), targets).item()


for kind in ('arcface', 'cosface'):
    loss = AngularPenaltySMLoss(kind, 4, 3)
    for length in (0.5, 1, 2, 10):
        loss.fc.weight.data = length * directions
        print(f'{kind}, weights of length {length}: {loss(inputs, targets).item():.2f}, right {right(kind):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

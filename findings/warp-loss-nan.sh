#!/usr/bin/env bash
# The WARP loss of warp_loss is NaN as soon as one example is ranked right, where each other label is
# tried: the better the model, the surer.
#
# Packages: warp-loss 0.0.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: the weight of an example is the logarithm of the number of labels over the number of tries
#   that found one ranked too high, rounded down. If none of them is, the tries are counted as one more
#   than there are, and the loss is multiplied by 0. With all other labels as tries the rounded number
#   is 0, its logarithm minus infinity, and 0 times that NaN, for the whole batch and its gradient.
# Expected: 0 for an example that is ranked right, as with fewer tries.
# Instead: give at most half of the labels as tries, or leave out examples that are ranked right.
# Source: Weston, Bengio and Usunier, WSABIE: Scaling Up To Large Vocabulary Image Annotation, IJCAI 2011.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'warp-loss==0.0.1' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
one example ranked wrong, 4 of 4 other labels: loss 1.802, gradients of the right label -1.386
one ranked right and one ranked wrong, 4 of 4 other labels: loss nan, gradients of the right label nan -1.386
one ranked right and one ranked wrong, 3 of 4 other labels: loss 1.802, gradients of the right label 0.000 -1.386
one ranked right, 4 of 4 other labels: loss nan, gradients of the right label nan
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from warp_loss.losses import warp_loss

# Scores of the right label and of the four others, in the order of the tries. A margin of 1 is asked for.
right, wrong = [0.9, -0.9, -0.8, -0.7, -0.6], [0.2, 0.5, 0.1, 0.0, 0.3]


def report(name, examples, tries):
    scores = torch.tensor(examples, requires_grad=True)
    loss = warp_loss(scores[:, :1], scores[:, 1:tries + 1], 5, torch.device('cpu'))
    loss.backward()
    print(f'{name}, {tries} of 4 other labels: loss {loss.item():.3f}, gradients of the right label',
          ' '.join(f'{value:.3f}' for value in scores.grad[:, 0]))


report('one example ranked wrong', [wrong], 4)
report('one ranked right and one ranked wrong', [right, wrong], 4)
report('one ranked right and one ranked wrong', [right, wrong], 3)
report('one ranked right', [right], 4)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The triplets of perte that are all possible ones are half of them: the anchor is the example that comes
# first in the batch, so that the loss depends on the order of the examples.
#
# Packages: perte 0.1.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: AllTripletSelector says that it returns all possible triplets. It takes each pair of a class
#   once, and never the second of the two as the anchor. A negative example that is close to the second
#   one only is not seen.
# Expected: both orders of each pair, as the other selectors of the package have them.
# Instead: add the triplets with the first two columns exchanged.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'perte==0.1.3' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
examples in the order [0, 1, 2]: triplets [[0, 1, 2]], loss 0.144, over all triplets 0.762
examples in the order [1, 0, 2]: triplets [[0, 1, 2]], loss 1.380, over all triplets 0.762
12 examples of 3 classes: 144 triplets of 288
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import itertools

import torch
from perte import AllTripletSelector, OnlineTripletLoss

angles = torch.tensor([0.0, 1.0, 1.2])  # of one class the first two; the third is close to the second one
embeddings, labels = torch.stack((angles.cos(), angles.sin()), 1), torch.tensor([0, 0, 1])


def right(embeddings, labels, margin=0.5):
    """Average the loss over all triplets of different examples."""
    losses = [max(0, ((embeddings[a] - embeddings[p])**2).sum() - ((embeddings[a] - embeddings[n])**2).sum() + margin)
              for a, p, n in itertools.permutations(range(len(labels)), 3)
              if labels[a] == labels[p] and labels[a] != labels[n]]
    return sum(losses) / len(losses)


loss = OnlineTripletLoss(AllTripletSelector())
for order in ([0, 1, 2], [1, 0, 2]):
    rows, classes = embeddings[order], labels[order]
    print(f'examples in the order {order}: triplets {AllTripletSelector().get_triplets(rows, classes).tolist()}, '
          f'loss {float(loss(rows, classes)[0]):.3f}, over all triplets {float(right(rows, classes)):.3f}')
torch.manual_seed(0)
labels = torch.arange(12) % 3
print(f'12 examples of 3 classes: {len(AllTripletSelector().get_triplets(torch.randn(12, 2), labels))} triplets of '
      f'{12 * 3 * 8}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

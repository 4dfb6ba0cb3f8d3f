#!/usr/bin/env bash
# The normalised alpha-DCG of recsys-metrics is above 1, since its ideal order is not the best
# one.
#
# Packages: recsys-metrics 0.0.4, torch 2.13.0, numpy 2.4.6.
# Behaviour: alpha_normalized_dcg divides by the gain of an ideal list, for which it sorts the
#   items by their number of topics. The measure lowers the gain of topics that were seen before,
#   which is what alpha is for, so items with many topics in common are a bad start: a list that
#   shows all topics has 1.24 of the "ideal" gain, and a list that repeats topics has 1.00.
# Expected: at most 1; the ideal list takes the item with the largest gain at each place.
# Instead: ret_alpha_dcg=True, divided by the gain of the greedy list.
# Source: Clarke and others, Novelty and Diversity in Information Retrieval Evaluation, SIGIR
#   2008.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'recsys-metrics==0.0.4'
cat > expected.txt <<'EXPECTED'
all topics first, alpha 0.9, 2 items: 1.24, of the best order 1.00
all topics first, alpha 0.9, 3 items: 1.04, of the best order 1.00
all topics first, alpha 0.5, 2 items: 1.00, of the best order 1.00
repeated topics first, alpha 0.9, 2 items: 1.00, of the best order 0.81
repeated topics first, alpha 0.9, 3 items: 1.00, of the best order 0.96
repeated topics first, alpha 0.5, 2 items: 1.00, of the best order 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import permutations
from math import log2

import torch
from recsys_metrics import alpha_normalized_dcg

topics = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
target = torch.tensor([topics])

def gain(order, alpha, k):
    seen, total = [0, 0, 0], 0.0
    for place, item in enumerate(order[:k]):
        total += sum(t * (1 - alpha) ** s for t, s in zip(topics[item], seen)) / log2(place + 2)
        seen = [s + t for t, s in zip(topics[item], seen)]
    return total

for name, order in (('all topics first', (0, 2, 1)), ('repeated topics first', (0, 1, 2))):
    scores = torch.tensor([[3.0 - order.index(item) for item in range(3)]])
    for alpha, k in ((0.9, 2), (0.9, 3), (0.5, 2)):
        result = alpha_normalized_dcg(scores, target, alpha=alpha, k=k).item()
        best = max(gain(other, alpha, k) for other in permutations(range(3)))
        print(f'{name}, alpha {alpha}, {k} items: {result:.2f}, of the best order {gain(order, alpha, k) / best:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The normalised discounted cumulative gain of ir-metrics is 1 for a list that finds one of ten relevant
# items.
#
# Packages: ir-metrics 0.1.6, numpy 2.4.6, pandas 2.3.3.
# Behaviour: ndcg divides by the gain of the found items in their best order, and not by the gain of all
#   relevant items. Items that are missing lower nothing, and a list without any relevant item has 0/0.
#   The argument weights, "the weights of each sample", reaches the denominator alone, so that a weight of
#   4 divides the score by 4.
# Expected: the gain of min(k, number of relevant items) at the top as the ideal: 0.22 for one of ten in a
#   list of ten, and 0 for none.
# Instead: sklearn.metrics.ndcg_score with the relevance of all items, or the formula below.
# Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques, ACM TOIS 20 (2002).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'ir-metrics==0.1.6'
cat > expected.txt <<'EXPECTED'
all ten: ir-metrics 1.00, by definition 1.00
one of ten, first: ir-metrics 1.00, by definition 0.22
two of ten, last: ir-metrics 0.36, by definition 0.13
none: ir-metrics nan, by definition 0.00
one item, found first, weight 1: ir-metrics 1.00
one item, found first, weight 2: ir-metrics 0.50
one item, found first, weight 4: ir-metrics 0.25
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from irmetrics.topk import ndcg


def right(relevant, found):
    gains = 1 / np.log2(np.arange(len(found)) + 2)
    ideal = gains[:min(len(relevant), len(found))].sum()
    return sum(gain for gain, item in zip(gains, found) if item in relevant) / ideal


relevant = list(range(1, 11))
for name, found in (('all ten', list(range(1, 11))), ('one of ten, first', [1, *range(90, 99)]),
                    ('two of ten, last', [*range(90, 98), 1, 2]), ('none', list(range(90, 100)))):
    print(f'{name}: ir-metrics {ndcg(relevant, found):.2f}, by definition {right(relevant, found):.2f}')
for weight in (1.0, 2.0, 4.0):
    print(f'one item, found first, weight {weight:.0f}: ir-metrics {ndcg([1], [1, 90], weights=weight):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

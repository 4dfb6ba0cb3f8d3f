#!/usr/bin/env bash
# The weighted recall of BinaryClassificationMetrics adds the false positive rate where the recall of the
# negatives belongs: a perfect classifier has 0.1 where a tenth is ill, and one that calls everybody ill has 1.
#
# Packages: BinaryClassificationMetrics 0.0.5.
# Behaviour: weighted_avg_recall_score weighs the recall of the positives and fall_out_score, which is one
#   minus the recall of the negatives, by the numbers of people. weighted_avg_precision_score is right.
# Expected: true_negative_rate in its place: the weighted recall is then the accuracy.
# Why it matters here: the worst model for the healthy has the best score.
# Instead: sklearn.metrics.recall_score(..., average='weighted').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'BinaryClassificationMetrics==0.0.5'
cat > expected.txt <<'EXPECTED'
perfect: weighted recall 0.10, by hand 1.00; weighted precision 1.00, by hand 1.00
nobody but one is ill: weighted recall 0.01, by hand 0.91; weighted precision 0.92, by hand 0.92
everybody but one is ill: weighted recall 0.99, by hand 0.11; weighted precision 0.91, by hand 0.91
one in nine is wrong: weighted recall 0.18, by hand 0.88; weighted precision 0.92, by hand 0.92
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import BinaryClassificationMetrics as metrics

PEOPLE = 100
truth = [1] * 10 + [0] * 90
models = {'perfect': truth, 'nobody but one is ill': [1] + [0] * 99, 'everybody but one is ill': [1] * 99 + [0],
          'one in nine is wrong': [label ^ (i % 9 == 0) for i, label in enumerate(truth)]}


def by_hand(found, score):
    return sum(score(kind, found) * truth.count(kind) for kind in (0, 1)) / PEOPLE


def recall(kind, found):
    return sum(a == b == kind for a, b in zip(found, truth)) / truth.count(kind)


def precision(kind, found):
    return sum(a == b == kind for a, b in zip(found, truth)) / found.count(kind)


for name, found in models.items():
    print(f'{name}: weighted recall {metrics.weighted_avg_recall_score(found, truth):.2f}, '
          f'by hand {by_hand(found, recall):.2f}; weighted precision '
          f'{metrics.weighted_avg_precision_score(found, truth):.2f}, by hand {by_hand(found, precision):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# ranking-metrics-torch gives people for whom nothing relevant is ranked high NaN in place of 0.
#
# Packages: ranking-metrics-torch 0.3.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: The metrics return NaN for a person without relevant items, as is documented. ndcg_at
#   and avg_precision_at call dcg_at and precision_at with the labels of the first k items, so
#   somebody whose relevant items all come later is taken for somebody without any. A mean that
#   skips NaN, which the people without items make necessary, skips exactly the worst rankings.
#   recall_at gives them 0.
# Expected: 0, as recall_at of the same package has it.
# Instead: replace NaN by 0 where labels.sum(dim=1) is above 0.
# Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques, ACM TOIS
#   2002.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ranking-metrics-torch==0.3.0'
cat > expected.txt <<'EXPECTED'
recall at 2: 1.00, 1.00, 0.00, 0.00; mean without NaN 0.50
recall at 3: 1.00, 1.00, 1.00, 0.00; mean without NaN 0.75
average precision at 2: 1.00, 1.00, 0.00, nan; mean without NaN 0.67
average precision at 3: 1.00, 1.00, 0.33, nan; mean without NaN 0.78
NDCG at 2: 1.00, 1.00, 0.00, nan; mean without NaN 0.67
NDCG at 3: 1.00, 1.00, 0.50, nan; mean without NaN 0.83
mean NDCG at 2 by hand: 0.50
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from ranking_metrics_torch.avg_precision import avg_precision_at
from ranking_metrics_torch.cumulative_gain import ndcg_at
from ranking_metrics_torch.precision_recall import recall_at

scores = torch.tensor([[0.9, 0.8, 0.2, 0.1]] * 4)
labels = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
ks = torch.tensor([2, 3])
for name, function in (('recall', recall_at), ('average precision', avg_precision_at), ('NDCG', ndcg_at)):
    result = function(ks, scores, labels)
    for column, k in enumerate((2, 3)):
        print(f'{name} at {k}:', ', '.join(f'{value:.2f}' for value in result[:, column].tolist()) + ';',
              f'mean without NaN {result[:, column].nanmean():.2f}')
gains = [0, 0]
for row in labels.tolist():
    hits = sum(row[i] / torch.log2(torch.tensor(i + 2.0)).item() for i in range(2))
    best = sum(1 / torch.log2(torch.tensor(i + 2.0)).item() for i in range(min(2, int(sum(row)))))
    gains[0] += hits / best
print(f'mean NDCG at 2 by hand: {gains[0] / 4:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

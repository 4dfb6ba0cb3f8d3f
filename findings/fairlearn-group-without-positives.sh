#!/usr/bin/env bash
# fairlearn gives a group without positives a true positive rate of 0 and a false negative rate of 0, and
# so the largest possible difference of equalised odds.
#
# Packages: fairlearn 0.15.0, scikit-learn 1.9.1, pandas 3.1.1, numpy 2.4.6.
# Behaviour: a rate whose denominator is empty is 0, without a warning. A perfect model has an
#   equalized_odds_difference of 1 as soon as one group holds no positive; by the false negative rate of
#   the same rows its difference is 0.
# Expected: a missing value, which the difference leaves out, or a warning as from scikit-learn.
# Why it matters here: small groups in a batch or at a hospital often have no case of a rare disease.
# Instead: count the positives of each group first, or use recall_score of scikit-learn with
#   zero_division=nan in a MetricFrame.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fairlearn==0.15.0' 'scikit-learn==1.9.1' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
a perfect model, no positives in the group small
large: true positive rate 1.0, false negative rate 0.0, recall 1.0
small: true positive rate 0.0, false negative rate 0.0, recall nan
differences: true positive rate 1.0, false negative rate 0.0, recall 0.0
equalized_odds_difference: 1.0
EXPECTED
env/bin/python - > seen.txt 2>&1 <<'PYTHON'
from functools import partial

import numpy as np
from fairlearn.metrics import (
    MetricFrame, equalized_odds_difference, false_negative_rate, true_positive_rate,
)
from sklearn.metrics import recall_score

groups = ['large'] * 8 + ['small'] * 4
labels = [1, 0, 0, 1, 0, 0, 1, 0] + [0] * 4
frame = MetricFrame(
    metrics={'true positive rate': true_positive_rate, 'false negative rate': false_negative_rate,
             'recall': partial(recall_score, zero_division=np.nan)},
    y_true=labels, y_pred=labels, sensitive_features=groups,
)
print('a perfect model, no positives in the group small')
for group, rates in frame.by_group.iterrows():
    print(f'{group}:', ', '.join(f'{name} {rate}' for name, rate in rates.items()))
print('differences:', ', '.join(f'{name} {value}' for name, value in frame.difference().items()))
difference = equalized_odds_difference(labels, labels, sensitive_features=groups)
print('equalized_odds_difference:', difference)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# river's ROCAUC is near 0.5 for a rare outcome, and ranks a worse model above a better one.
#
# Packages: river 0.26.1, scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: ROCAUC counts at ten thresholds between 0 and 1. Where one patient in a hundred has
#   the outcome, good probabilities lie below the first of them, 0.11. Its documentation says that
#   the error is not significant for calibrated probabilities, and that models can be compared
#   reliably. The probabilities below are calibrated exactly (labels are drawn from them), and a
#   model that exaggerates and has more noise gets a higher value.
# Expected: an error that is stated, or thresholds that follow the scores.
# Instead: RollingROCAUC with a window of all patients, or roc_auc_score of scikit-learn; with
#   n_thresholds of 1000 the value is right to two decimals here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'river==0.26.1' 'scikit-learn==1.9.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
share with the outcome 0.010
calibrated: river 0.50, with 1000 thresholds 0.77, exact 0.77
with noise, 20 times the odds: river 0.70, with 1000 thresholds 0.72, exact 0.72
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from river.metrics import ROCAUC
from sklearn.metrics import roc_auc_score

random = np.random.default_rng(0)
probability = random.beta(0.8, 80, size=20_000)
outcome = random.random(20_000) < probability
logit = np.log(probability / (1 - probability)) + random.normal(0, 1, size=20_000)
models = {
    'calibrated': probability,
    'with noise, 20 times the odds': 1 / (1 + np.exp(-(logit + np.log(20)))),
}
print(f'share with the outcome {outcome.mean():.3f}')
for name, scores in models.items():
    values = []
    for thresholds in (10, 1000):
        metric = ROCAUC(n_thresholds=thresholds)
        for label, score in zip(outcome.tolist(), scores.tolist()):
            metric.update(label, score)
        values.append(metric.get())
    exact = roc_auc_score(outcome, scores)
    print(f'{name}: river {values[0]:.2f}, with 1000 thresholds {values[1]:.2f}, exact {exact:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

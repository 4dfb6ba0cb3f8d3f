#!/usr/bin/env bash
# threshopt looks for the threshold of a decision function between 0 and 1.
#
# Packages: threshopt 1.1.1, scikit-learn 1.9.1, numpy 2.4.6, scipy 1.17.1, matplotlib 3.11.2, plotly
#   7.1.0, pandas 2.3.3.
# Behaviour: optimize_threshold documents models with predict_proba or decision_function, and takes the
#   latter where there is no predict_proba. It then tries 200 thresholds from 0 to 1. The scores of a
#   decision function have no such limits, and are mostly negative for a rare class. All thresholds that
#   improve on 0 are then outside. No message says so, and the threshold 0 is returned as the optimal one.
# Expected: the threshold that is best of all scores.
# Instead: try the scores themselves, as below, or calibrate the model first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'plotly==7.1.0'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'threshopt==1.1.1'
cat > expected.txt <<'EXPECTED'
LogisticRegression: scores from 0.0 to 1.0; threshopt 0.1 with 0.83; of all scores 0.1 with 0.84
RidgeClassifier: scores from -1.4 to -0.1; threshopt 0.0 with 0.50; of all scores -0.7 with 0.83
LinearSVC: scores from -2.5 to 0.8; threshopt 0.0 with 0.62; of all scores -0.7 with 0.84
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import balanced_accuracy_score
from sklearn.svm import LinearSVC
from threshopt import optimize_threshold

random = np.random.default_rng(0)
ill = (random.random(2000) < 0.05).astype(int)
values = random.normal(size=(2000, 2)) + 1.5 * ill[:, None]
for model in (LogisticRegression(), RidgeClassifier(), LinearSVC()):
    model.fit(values, ill)
    threshold, score = optimize_threshold(model, values, ill, metric=balanced_accuracy_score, plot=False, cm=False)
    probabilities = hasattr(model, 'predict_proba')
    scores = model.predict_proba(values)[:, 1] if probabilities else model.decision_function(values)
    best, where = max((balanced_accuracy_score(ill, scores >= limit), limit) for limit in np.unique(scores))
    print(f'{type(model).__name__}: scores from {scores.min():.1f} to {scores.max():.1f}; threshopt {threshold:.1f} with '
          f'{score:.2f}; of all scores {where:.1f} with {best:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

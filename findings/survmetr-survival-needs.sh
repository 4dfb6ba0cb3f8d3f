#!/usr/bin/env bash
# survmetr compares the probability to survive with the deaths.
#
# Packages: survmetr 0.1.0, scikit-survival 0.28.0, numpy 2.4.6, scikit-learn 1.9.1, pandas 2.3.3.
# Behaviour: make_survival_scorer(needs="survival") hands the probability to survive to the score,
#   and as the truth whether the person has died by that time, as for needs="failure". A model that
#   knows each time of death has an AUC of 0, and a Brier score of 1 in place of 0; the opposite
#   model is perfect. The documentation names the arguments of the score in the order prediction,
#   truth, and calls it with truth, prediction.
# Expected: deaths for failure and survivors for survival, which gives the same AUC and Brier score.
# Instead: needs="failure", and scores that take the truth first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'survmetr==0.1.0' 'scikit-survival==0.28.0' 'numpy==2.4.6' 'scikit-learn==1.9.1' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
knows each death, needs=failure: AUC 1.0, Brier score 0.0
knows each death, needs=survival: AUC 0.0, Brier score 1.0
always wrong, needs=failure: AUC 0.0, Brier score 1.0
always wrong, needs=survival: AUC 1.0, Brier score 0.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from sklearn.metrics import brier_score_loss, roc_auc_score
from sksurv.util import Surv
from survmetr.classification import make_survival_scorer

death = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
truth = Surv.from_arrays(np.ones(6, dtype=bool), death)

class Oracle:
    def __init__(self, right):
        self.right = right

    def predict_survival(self, times_of_death, times):
        alive = (times_of_death[:, None] > np.asarray(times)[None, :]).astype(float)
        return alive if self.right else 1 - alive

for right in (True, False):
    for needs in ('failure', 'survival'):
        scores = []
        for score in (roc_auc_score, brier_score_loss):
            scorer = make_survival_scorer(score, needs=needs, time_mode='absolute', time_values=[1.5, 3.5, 5.5])
            scores.append(scorer(Oracle(right), death, truth))
        print(f"{'knows each death' if right else 'always wrong'}, needs={needs}: AUC {scores[0]:.1f}, Brier score {scores[1]:.1f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The tuning of conformalopt keeps its promise on the coverage only where the last value of the
# grid reaches it.
#
# Packages: conformalopt 0.1.0, statsmodels 0.14.6, scipy 1.17.1, pandas 3.1.1, numpy 2.4.6,
#   matplotlib 3.11.2, tqdm 4.67.1.
# Behaviour: fit keeps the best parameters among those whose coverage is within 0.01 of 1 - alpha,
#   and the best of all. It then chooses between both by the coverage of the last run and not by
#   whether any run reached it, which it has counted too. The default grid ends with a learning
#   rate of 100000.
# Expected: "The hyperparameters leading to the best quantile loss, provided 1-alpha-0.01 coverage
#   was achieved, are selected. If no selection achieves this coverage constraint, the coverage
#   constraint is disregarded."
# Why it matters here: intervals that were tuned for 90 % are accepted with less, although a value
#   with 90 % was in the grid.
# Instead: put a value that reaches the coverage last, or compare the runs by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statsmodels==0.14.6' 'scipy==1.17.1' 'pandas==3.1.1' 'numpy==2.4.6' 'matplotlib==3.11.2' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'conformalopt==0.1.0'
cat > expected.txt <<'EXPECTED'
learning rate 0.001: coverage 0.694, quantile loss 0.173
learning rate 0.01: coverage 0.810, quantile loss 0.143
learning rate 0.1: coverage 0.888, quantile loss 0.133
learning rate 1.0: coverage 0.898, quantile loss 0.158
grid [0.001, 0.01, 0.1, 1.0]: chosen 1.0
grid [1.0, 0.1, 0.01, 0.001]: chosen 0.1
grid [0.001, 1.0, 0.01, 0.1]: chosen 0.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import os
import sys

import numpy as np

sys.stderr = open(os.devnull, 'w')  # progress bars
from conformalopt import ConformalPredictor
from conformalopt.utils import quantile_loss

random = np.random.default_rng(0)
scores = np.abs(random.normal(size=500))
for rate in (0.001, 0.01, 0.1, 1.0):
    predictor = ConformalPredictor(alpha=0.1, quantile_tracker='scalar', lr_type='fixed', hypers={'lr': rate})
    predictor.init_active_fields()
    for score in scores:
        predictor.step(predictor.predict(), score)
    inside = np.mean(np.array(predictor.past_predictions) >= scores)
    print(f'learning rate {rate}: coverage {inside:.3f}, quantile loss {quantile_loss(scores, predictor.past_predictions, 0.9):.3f}')
for grid in ([0.001, 0.01, 0.1, 1.0], [1.0, 0.1, 0.01, 0.001], [0.001, 1.0, 0.01, 0.1]):
    predictor = ConformalPredictor(alpha=0.1, quantile_tracker='scalar', lr_type='fixed', hypers={})
    with contextlib.redirect_stdout(io.StringIO()):
        predictor.fit(list(scores), hyper_grid_overrides={'lr': grid})
    print(f'grid {grid}: chosen {predictor.hypers["lr"]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

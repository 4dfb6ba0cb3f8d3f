#!/usr/bin/env bash
# The criterion by which prediction-interval chooses its quantiles favours wide intervals: a hundred standard
# deviations are chosen before intervals of 90 %, for every eta.
#
# Packages: prediction-interval 0.1.9, xgboost-cpu 3.2.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1, scikit-learn 1.9.1,
#   matplotlib 3.11.2, seaborn 0.13.2.
# Behaviour: cwc is (1 - width) exp(-eta (coverage - (1 - alpha))), and the grid search takes the lowest, as its
#   description says. 1 - width falls as the width grows, and the exponential falls as the coverage grows, also far above
#   the aim. alpha is "the desired coverage level", 0.9, which makes the aim 0.1. A lower eta should "favour
#   narrow" intervals; with 0 the widest are the best.
# Expected: a criterion that grows with the width, or its highest value with a square of the difference, as in the paper
#   that it names (Jensen and others, 2022, "Ensemble conformalized quantile regression").
# Why it matters here: intervals of risks are compared by such numbers.
# Instead: the narrowest of the intervals whose coverage is the one asked for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'xgboost-cpu==3.2.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'seaborn==0.13.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'prediction-interval==0.1.9'
cat > expected.txt <<'EXPECTED'
eta 0: +/- 0.67 0.832, +/- 1.645 0.587, +/- 2.576 0.353, +/- 100.0 -24.1 ; lowest +/- 100.0
eta 1: +/- 0.67 0.56, +/- 1.645 0.263, +/- 2.576 0.145, +/- 100.0 -9.8 ; lowest +/- 100.0
eta 30: +/- 0.67 5.91e-06, +/- 1.645 2.01e-11, +/- 2.576 9.08e-13, +/- 100.0 -4.53e-11 ; lowest +/- 100.0
coverage: 50%, 90%, 99%, 100%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from prediction_interval import XGBoostCQR

values = np.random.default_rng(0).normal(0, 1, 20000)
model = XGBoostCQR(alpha=0.9)
for eta in (0, 1, 30):
    found = {}
    for half in (0.67, 1.645, 2.576, 100.0):
        lower, upper = np.full(len(values), -half), np.full(len(values), half)
        found[half] = model.cwc(model.alpha, values, lower, upper, eta=eta)
    best = min(found, key=found.get)
    print(f'eta {eta}:', ', '.join(f'+/- {half} {value:.3g}' for half, value in found.items()), f'; lowest +/- {best}')
coverages = [np.mean(np.abs(values) <= half) for half in (0.67, 1.645, 2.576, 100.0)]
print('coverage:', ', '.join(f'{coverage:.0%}' for coverage in coverages))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

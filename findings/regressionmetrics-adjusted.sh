#!/usr/bin/env bash
# The adjusted R² of regressionmetrics takes the number of people for the number of variables: it is 49 for a
# model with an R² of 0.5 and 100 people, documented to be 1 at best, and the worse the model the higher.
#
# Packages: regressionmetrics 1.4.0, numpy 2.4.6, scikit-learn 1.9.1.
# Behaviour: AdjR2CoefScore divides by len(y_true) - len(y_pred) - 1, which is always -1, and subtracts the
#   result from R² once more: R² + (1 - R²)(n - 1). It asks for no number of variables.
# Expected: 1 - (1 - R²)(n - 1) / (n - p - 1) for p variables: a little below R², 1 at best.
# Instead: that formula, as below.
# Source: Ezekiel, Methods of Correlation Analysis, 1930.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'regressionmetrics==1.4.0'
cat > expected.txt <<'EXPECTED'
20 people, perfect: R² 1.00, adjusted 1.00, for 3 variables by hand 1.00
20 people, good: R² 0.91, adjusted 2.62, for 3 variables by hand 0.89
20 people, middling: R² 0.51, adjusted 9.82, for 3 variables by hand 0.42
20 people, useless: R² 0.00, adjusted 19.00, for 3 variables by hand -0.19
100 people, perfect: R² 1.00, adjusted 1.00, for 3 variables by hand 1.00
100 people, good: R² 0.91, adjusted 9.82, for 3 variables by hand 0.91
100 people, middling: R² 0.51, adjusted 49.02, for 3 variables by hand 0.49
100 people, useless: R² 0.00, adjusted 99.00, for 3 variables by hand -0.03
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from regressionmetrics.metrics import AdjR2CoefScore, R2CoefScore

random = np.random.default_rng(0)
VARIABLES = 3
for people in (20, 100):
    truth = random.normal(0, 1, people)
    for name, noise in (('perfect', 0.0), ('good', 0.3), ('middling', 0.7), ('useless', 1.0)):
        error = random.normal(0, 1, people)
        predicted = truth + noise * error * np.std(truth) / np.sqrt(np.mean(error ** 2))
        r2 = R2CoefScore(truth, predicted)
        right = 1 - (1 - r2) * (people - 1) / (people - VARIABLES - 1)
        print(f'{people} people, {name}: R² {r2:.2f}, adjusted {AdjR2CoefScore(truth, predicted):.2f}, '
              f'for {VARIABLES} variables by hand {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

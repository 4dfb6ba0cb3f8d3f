#!/usr/bin/env bash
# The AIC and BIC of toad are better for a worse model.
#
# Packages: toad 0.1.7, scikit-learn 1.9.1, pandas 2.3.3, numpy 2.4.6, scipy 1.17.1.
# Behaviour: AIC(y_pred, y, k) and BIC of toad.metrics take the logarithm of the sum of squared errors for
#   the log-likelihood, unless it is passed. The likelihood falls as the errors grow, so the sign is
#   wrong, and a factor of half the number of records is missing: a lower criterion, which
#   is the better one, belongs to the model with larger errors.
# Expected: -n / 2 log(SSE / n) up to a constant, or no default.
# Instead: pass llf, the log-likelihood of the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'toad==0.1.7' 'scikit-learn==1.9.1' 'pandas==2.3.3' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
slope 3, the true one True: squared errors 442; toad AIC -10.2, BIC -6.0; from the likelihood 1360, 1364
slope 2, the true one False: squared errors 963; toad AIC -11.7, BIC -7.5; from the likelihood 1749, 1753
slope -3, the true one False: squared errors 18990; toad AIC -17.7, BIC -13.5; from the likelihood 3239, 3244
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from toad.metrics import AIC, BIC

random = np.random.default_rng(0)
balance = random.normal(size=500)
loss = 3 * balance + random.normal(size=500)
for slope in (3, 2, -3):
    prediction = slope * balance
    squares = np.sum((loss - prediction) ** 2)
    likelihood = -250 * (np.log(2 * np.pi * squares / 500) + 1)
    print(f'slope {slope}, the true one {slope == 3}: squared errors {squares:.0f};',
          f'toad AIC {AIC(prediction, loss, 1):.1f}, BIC {BIC(prediction, loss, 1):.1f};',
          f'from the likelihood {2 - 2 * likelihood:.0f}, {np.log(500) - 2 * likelihood:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

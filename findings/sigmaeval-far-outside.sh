#!/usr/bin/env bash
# sigmaeval gives a forecast that is wrong by a million the score of one that is wrong by one.
#
# Packages: sigmaeval 0.1.0, numpy 1.26.4, scikit-learn 1.5.2, scipy 1.13.1.
# Behaviour: crps_quantile sums the squared difference of the levels and the step of the true value
#   between the smallest and the largest quantile, and nothing beyond them. The error of a value
#   outside, which grows by the distance, stays the same: with quantiles from 1 to 9 the score of 10
#   is 2.84, and so is the score of a million. Between two quantiles the score does not change
#   either: 5.1 and 5.9 have the same one. By default the score is divided by the standard deviation
#   of the true values, so that one such value improves the score.
# Expected: a score that grows with the distance, such as twice the mean pinball loss.
# Instead: sklearn.metrics.mean_pinball_loss at each level.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scikit-learn==1.5.2' 'scipy==1.13.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'sigmaeval==0.1.0'
cat > expected.txt <<'EXPECTED'
true value 5.1: 0.84, twice the pinball loss 0.90
true value 5.9: 0.84, twice the pinball loss 0.99
true value 9.0: 2.04, twice the pinball loss 2.67
true value 10.0: 2.84, twice the pinball loss 3.67
true value 20.0: 2.84, twice the pinball loss 13.67
true value 1000000.0: 2.84, twice the pinball loss 999993.67
4, 5, 6 and 10 together, normalised: 0.61029
4, 5, 6 and 20 together, normalised: 0.21275
4, 5, 6 and 1000000 together, normalised: 0.00000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from sigmaeval.sigmaeval import crps_quantile
from sklearn.metrics import mean_pinball_loss

levels = np.arange(0.1, 1, 0.1)
quantiles = np.arange(1.0, 10.0)
for truth in (5.1, 5.9, 9.0, 10.0, 20.0, 1e6):
    score = crps_quantile(quantiles[:, None], levels, np.array([truth]), normalization=False)
    pinball = np.mean([2 * mean_pinball_loss([truth], [value], alpha=level) for level, value in zip(levels, quantiles)])
    print(f'true value {truth:.1f}: {score:.2f}, twice the pinball loss {pinball:.2f}')
for last in (10.0, 20.0, 1e6):
    truths = np.array([4.0, 5.0, 6.0, last])
    score = crps_quantile(np.tile(quantiles[:, None], 4), levels, truths)
    print(f'4, 5, 6 and {last:.0f} together, normalised: {score:.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The relative intervals of adaptive-conformal-inference are turned round where a prediction is negative, from -8 to
# -12, so that no value is in them, while it reports that 90 % are.
#
# Packages: adaptive-conformal-inference 1.0.1, numpy 2.4.6.
# Behaviour: relative_error_score divides the error by |prediction|. relative_interval_set multiplies the
#   prediction by 1 - q and 1 + q, which for a negative one gives the upper end first. The class counts hits by the
#   scores and not by the interval that it gave out, so its coverage looks right.
# Expected: prediction -/+ q |prediction|, the values whose score is at most q.
# Why it matters here: losses, balances and temperatures are negative; whoever checks lower <= y <= upper finds
#   each value outside.
# Instead: a set_fn of one's own with the absolute value.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'adaptive-conformal-inference==1.0.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
prediction 10: last interval from 8.2 to 11.8; values inside 90%, reported 90%
prediction -10: last interval from -8.2 to -11.8; values inside 0%, reported 90%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from aci import ACI, relative_error_score, relative_interval_set

for prediction in (10.0, -10.0):
    random = np.random.default_rng(0)
    aci = ACI(alpha=0.1, gamma=0.01, score_fn=relative_error_score, set_fn=relative_interval_set)
    reported, inside = [], []
    for day in range(3000):
        value = prediction + random.normal()
        lower, upper = aci.issue(prediction)
        outcome = aci.observe(value)
        reported.append(outcome['hit'])
        inside.append(lower <= value <= upper)
    print(f'prediction {prediction:g}: last interval from {lower:.1f} to {upper:.1f}; values inside '
          f'{np.mean(inside):.0%}, reported {np.mean(reported):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The private Cox model of FederatedHPLearning adds the noise of a mean to a sum: for a hospital with 100 people
# the noise is 100 times too small, and ε is 300 where 1 was asked for, in each epoch.
#
# Packages: FederatedHPLearning 1.0.2, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1,
#   matplotlib 3.11.2.
# Behaviour: local_cox_train sums the clipped gradients of the people and adds noise with a deviation of
#   clipping norm × multiplier / n. local_train_dp, its logistic regression, adds the whole noise to the sum and
#   then divides both. A clipped gradient in the Cox model also depends on all other people at risk, so that
#   one person moves the sum by more than the norm.
# Expected: a deviation of clipping norm × multiplier, as in the logistic regression.
# Why it matters here: the larger the hospital, the less private.
# Instead: ε / n in place of ε, for one epoch.
# Source: Abadi and others, Deep Learning with Differential Privacy, CCS 2016; Balle and Wang, Improving the
#   Gaussian Mechanism, ICML 2018, theorem 8, for the exact ε of Gaussian noise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'FederatedHPLearning==1.0.2'
cat > expected.txt <<'EXPECTED'
10 people, noise of the sum: needed 4.84, Cox 0.478, logistic 4.89; ε of one epoch: asked for 1, Cox 10 or more, logistic 0.75
30 people, noise of the sum: needed 4.84, Cox 0.159, logistic 4.89; ε of one epoch: asked for 1, Cox 45 or more, logistic 0.75
100 people, noise of the sum: needed 4.84, Cox 0.048, logistic 4.89; ε of one epoch: asked for 1, Cox 300 or more, logistic 0.75
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import numpy as np
from federated_hplearning.cox_numpy import local_cox_train
from federated_hplearning.logistic_numpy import local_train_dp

EPSILON, DELTA, NORM, RUNS, FEATURES = 1.0, 1e-5, 1.0, 200, 5
needed = NORM * math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON


def exact_epsilon(deviation):
    mu = NORM / deviation

    def tail(x):
        return 0.5 * math.erfc(x / math.sqrt(2))

    low, high = 0.0, 600.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        delta = tail(middle / mu - mu / 2) - math.exp(middle) * tail(middle / mu + mu / 2)
        low, high = (middle, high) if delta > DELTA else (low, middle)
    return high


for people in (10, 30, 100):
    nothing = np.zeros((people, FEATURES))  # no signal: what is released is the noise
    times, events = np.arange(people) + 1.0, np.ones(people)
    np.random.seed(0)
    cox = np.array([local_cox_train(nothing, times, events, epochs=1, lr=1.0, alpha=0.0, dp_enabled=True,
                                    epsilon=EPSILON, delta=DELTA, clipping_norm=NORM) for _ in range(RUNS)])
    logistic = np.array([local_train_dp(nothing, events, np.zeros(FEATURES), 1, 1.0, EPSILON, DELTA, NORM, random_seed=i)[0]
                         for i in range(RUNS)]) * people
    print(f'{people} people, noise of the sum: needed {needed:.2f}, Cox {cox.std():.3f}, logistic {logistic.std():.2f}; '
          f'ε of one epoch: asked for {EPSILON:.0f}, Cox {exact_epsilon(needed / people):.0f} or more, '
          f'logistic {exact_epsilon(needed):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# With three arms, the standard errors of ate-python are three to four times too large: the mean of an arm
# has an error of 0.47, and of 0.14 where the two other arms are one.
#
# Packages: ATE-python 0.0.2, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: the covariance for several arms multiplies the second derivative of the calibration function
#   twice into the matrix that links weights and means; the one for two arms does it once. The estimates
#   agree.
# Expected: the mean of an arm and its error depend on this arm and on the covariates of everybody, so they
#   are the same with two arms and with three. The bootstrap agrees with the ones of two.
# Why it matters here: an effect of six standard errors is not significant.
# Instead: one call for each arm, with treat=(arm == j).
# Source: Chan, Yam and Zhang, Globally efficient non-parametric inference of average treatment effects by
#   empirical balancing calibration weighting, 2016.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ATE-python==0.0.2' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
arm 0: with three arms mean 1.98, error 0.47; against the others mean 1.98, error 0.14; bootstrap 0.13
arm 1: with three arms mean 2.79, error 0.42; against the others mean 2.79, error 0.14; bootstrap 0.13
arm 2: with three arms mean 3.87, error 0.63; against the others mean 3.87, error 0.14; bootstrap 0.14
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ATE import ATE

random = np.random.default_rng(1)
PEOPLE = 600
covariates = random.normal(size=(PEOPLE, 2))
arms = random.integers(0, 3, PEOPLE)
outcomes = 2 + 3 * covariates[:, 0] + arms + random.normal(size=PEOPLE)


def fit(rows, treatment):
    model = ATE()
    result = model.fit(outcomes[rows], treatment[rows], covariates[rows])
    return list(result['estimate'].values()), np.sqrt(np.diag(result['vcov']))


everybody = np.arange(PEOPLE)
means, errors = fit(everybody, arms)
drawn = [fit(random.integers(0, PEOPLE, PEOPLE), arms)[0] for repeat in range(200)]
for arm in range(3):
    two_means, two_errors = fit(everybody, (arms == arm).astype(int))
    print(f'arm {arm}: with three arms mean {means[arm]:.2f}, error {errors[arm]:.2f}; against the others '
          f'mean {two_means[0]:.2f}, error {two_errors[0]:.2f}; bootstrap {np.std(drawn, axis=0)[arm]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The standard error of the weighting estimator in causal-lens is almost four times too large, since the correction for
# the estimated propensities has the wrong sign: it makes the error larger where it should make it smaller.
#
# Packages: causal-lens 0.3.1, statsmodels 0.14.4, scikit-learn 1.6.1, scipy 1.15.3, pandas 2.2.3, numpy 1.26.4,
#   matplotlib 3.10.1.
# Behaviour: to the influence of each person belongs the derivative of the estimate by the coefficients of the
#   propensities times the influence of the person on these. It is subtracted and not added.
# Expected: an error near the standard deviation of the estimates, and a smaller one than without the correction.
# Why it matters here: the p-value is computed from it, and an effect of 0.5 is found in a tenth of the studies and not in
#   all.
# Instead: the interval of the bootstrap that the same object returns.
# Source: Lunceford and Davidian (2004), "Stratification and weighting via the propensity score in estimation of causal
#   treatment effects", Statistics in Medicine 23(19): estimated propensities reduce the variance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'causal-lens==0.3.1' 'statsmodels==0.14.4' 'scikit-learn==1.6.1' 'scipy==1.15.3' 'pandas==2.2.3' 'numpy==1.26.4' 'matplotlib==3.10.1'
cat > expected.txt <<'EXPECTED'
effect 0.5: mean estimate 0.50, standard deviation of the estimates 0.09
standard error with the correction 0.33, without it 0.18
significant 10%, with the standard deviation of the estimates 100%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from causal_lens import IPWEstimator

random = np.random.default_rng(0)
found = []
for study in range(100):
    first, second = random.normal(size=(2, 1000))
    treated = (random.random(1000) < 1 / (1 + np.exp(-(0.8 * first - 0.5 * second)))).astype(int)
    table = pd.DataFrame({'first': first, 'second': second, 'treated': treated})
    table['outcome'] = 2 * first + second + 0.5 * treated + random.normal(size=1000)
    estimator = IPWEstimator('treated', 'outcome', ['first', 'second'], bootstrap_repeats=2)
    with_correction = estimator.fit(table)
    estimator.account_for_propensity_estimation = False
    found.append([with_correction.effect, with_correction.se, estimator.fit(table).se, with_correction.p_value])
effects, errors, plain, values = np.array(found).T
print(f'effect 0.5: mean estimate {effects.mean():.2f}, standard deviation of the estimates {effects.std():.2f}')
print(f'standard error with the correction {errors.mean():.2f}, without it {plain.mean():.2f}')
right = (np.abs(effects) / effects.std() > 1.96).mean()
print(f'significant {(values < 0.05).mean():.0%}, with the standard deviation of the estimates {right:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

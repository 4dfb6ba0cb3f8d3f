#!/usr/bin/env bash
# The sampler of ab-bayes-test counts its data twice: the standard deviation of a proportion is 0.7 of the
# right one, and a difference with a probability of 95 % has one of 99 %.
#
# Packages: ab-bayes-test 0.1.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: for inference_type='mcmc' and proportions, the prior is the beta distribution of the
#   posterior, with the successes and failures of the group, and is multiplied by the likelihood of the
#   same people. The other type, conjugate, which is the default, is right.
# Expected: the same posterior from both, Beta(1 + successes, 1 + failures), which is also the one of the
#   formula.
# Why it matters here: a sampler is taken to check a formula, and here it makes the result look more
#   certain.
# Instead: inference_type='conjugate'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ab-bayes-test==0.1.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
60 and 60 of 200, exact: standard deviations 0.032, 0.032, probability that treated is higher 0.50
  conjugate: standard deviations 0.032, 0.032, probability 0.50
  mcmc: standard deviations 0.023, 0.023, probability 0.49
60 and 75 of 200, exact: standard deviations 0.032, 0.034, probability that treated is higher 0.94
  conjugate: standard deviations 0.032, 0.034, probability 0.95
  mcmc: standard deviations 0.023, 0.024, probability 0.99
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from ab_bayes_test import ABBayesTest
from scipy.stats import beta

PEOPLE = 200
for treated in (60, 75):
    successes = {'control': 60, 'treated': treated}
    table = pd.DataFrame([(group, int(number < count)) for group, count in successes.items()
                          for number in range(PEOPLE)], columns=['group', 'success'])
    exact = {group: beta(1 + count, 1 + PEOPLE - count) for group, count in successes.items()}
    drawn = [exact[group].rvs(400_000, random_state=number) for number, group in enumerate(successes)]
    print(f'60 and {treated} of {PEOPLE}, exact: standard deviations '
          f'{", ".join(f"{posterior.std():.3f}" for posterior in exact.values())}, probability that treated '
          f'is higher {np.mean(drawn[1] > drawn[0]):.2f}')
    for kind in ('conjugate', 'mcmc'):
        np.random.seed(0)
        test = ABBayesTest(table, 'group', 'success', metric_type='proportion', inference_type=kind,
                           control_group='control', treatment_group='treated', sampling_size=20_000).fit()
        deviations = [test.results()[group]['std'] for group in successes]
        print(f'  {kind}: standard deviations {", ".join(f"{deviation:.3f}" for deviation in deviations)}, '
              f'probability {test.probability():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

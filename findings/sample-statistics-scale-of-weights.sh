#!/usr/bin/env bash
# The standard error of sample-statistics depends on the scale of the weights: weights of 10 in place of 1
# make it a third, a million makes it 0.002, and weights that add up to 1 make it NaN.
#
# Packages: sample-statistics 1.0.1, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1, statsmodels 0.15.0.
# Behaviour: the weights are taken for numbers of copies of each value. The error is the one of a sample as
#   large as the sum of the weights, and the standard deviation divides by this sum less 1. Any positive
#   weights are accepted, and what they are is not documented. The mean does not depend on their scale.
# Expected: the same error for weights of 1 and of 10, as for weights of a survey; an error for weights
#   whose sum is at most 1.
# Why it matters here: weights of a survey add up to the people of a country, or to 1.
# Instead: weights whose sum is the number of values, or the error by linearization.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'sample-statistics==1.0.1' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1' 'statsmodels==0.15.0'
cat > expected.txt <<'EXPECTED'
50 values: mean 121.93, standard deviation 13.81, error 1.95
weights of 1: mean 121.93, standard deviation 13.81, error 1.952
weights of 10: mean 121.93, standard deviation 13.68, error 0.612
weights of 1 million: mean 121.93, standard deviation 13.67, error 0.002
weights of 1/25: mean 121.93, standard deviation 19.33, error 13.667
weights of 1/50: mean 121.93, standard deviation inf, error nan
weights of 1/100: mean 121.93, standard deviation nan, error nan
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import warnings

import numpy as np
from sample_statistics.main import WeightedStatsCalculator

warnings.simplefilter('ignore')
values = np.random.default_rng(0).normal(120, 15, 50)
print(f'50 values: mean {values.mean():.2f}, standard deviation {values.std(ddof=1):.2f}, error '
      f'{values.std(ddof=1) / np.sqrt(50):.2f}')
for name, weight in (('1', 1), ('10', 10), ('1 million', 1e6), ('1/25', 1 / 25), ('1/50', 1 / 50),
                     ('1/100', 1 / 100)):
    found = WeightedStatsCalculator().add(values, np.full(50, weight, float))
    print(f'weights of {name}: mean {found["weighted_mean"]:.2f}, standard deviation '
          f'{found["weighted_std"]:.2f}, error {found["standard_error_mean"]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

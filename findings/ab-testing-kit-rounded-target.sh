#!/usr/bin/env bash
# The sample size of ab-testing-kit rounds the mean that is to be found to one decimal: for a rise of 5 % from
# 1.2 it asks for 2260 people where 6279 are needed, and for an infinite number from 0.5.
#
# Packages: ab-testing-kit 0.1.5, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1 (newer than the ones that it pins).
# Behaviour: sample_size_calc for a continuous metric computes the mean of the second group as
#   round(mean + mean * mde / 100, 1), whatever the size of the mean is.
# Expected: a number that depends on the mean and the standard deviation by their ratio: the same metric in
#   other units needs the same people.
# Why it matters here: a study of a third of the people finds the effect in 39 % of the cases in place of 80 %.
# Instead: choose a unit in which the mean is above 1000.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ab-testing-kit==0.1.5'
cat > expected.txt <<'EXPECTED'
mean and standard deviation 0.5 g, rise of 5 %: inf people in each group, by the formula 6279; power 100%
mean and standard deviation 0.9 g, rise of 5 %: inf people in each group, by the formula 6279; power 100%
mean and standard deviation 1.2 g, rise of 5 %: 2260 people in each group, by the formula 6279; power 39%
mean and standard deviation 1.2 kg, rise of 5 %: 6279 people in each group, by the formula 6279; power 80%
mean and standard deviation 3.4 g, rise of 5 %: 4537 people in each group, by the formula 6279; power 66%
mean and standard deviation 90 g, rise of 5 %: 6279 people in each group, by the formula 6279; power 80%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import sqrt

from ab_testing_kit.data_splitting.sample_size_calculation import sample_size_calc
from scipy import stats

for mean, unit in ((0.5, 'g'), (0.9, 'g'), (1.2, 'g'), (1.2, 'kg'), (3.4, 'g'), (90, 'g')):
    value = mean * 1000 if unit == 'kg' else mean
    found = sample_size_calc(value, 5, 0.05, 0.2, tail_type=2, std_metric=value, metric_type='continuous')
    right = 2 * (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) ** 2 / 0.05**2
    size = found['sample_size']
    power = stats.norm.cdf(0.05 / sqrt(2 / size) - stats.norm.ppf(0.975)) if size < 1e9 else 1
    print(f'mean and standard deviation {mean} {unit}, rise of 5 %: {size:.0f} people in each group, '
          f'by the formula {right:.0f}; power {power:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

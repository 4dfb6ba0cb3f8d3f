#!/usr/bin/env bash
# The private mean, sum and variance of diff-priv-laplace-python take the range of the values from the values:
# where all are equal the mean is exact, and one person with another value is seen in each release.
#
# Packages: diff-priv-laplace-python 1.0.5, numpy 1.26.4.
# Behaviour: the sensitivity is (max - min) / n of the data themselves. A column of equal values has a noise of
#   0, for any ε, and a column in which one person differs has noise: no ε bounds the ratio of the two
#   probabilities. The size of the noise also shows the largest value, here of the one high income. The
#   functions take no limits; the mechanism beneath them does.
# Expected: noise for limits that do not depend on the people, as each definition of the privacy budget that
#   it describes asks for.
# Instead: DiffPrivLaplaceMechanism.anonymize_mean_with_budget with limits that are known beforehand.
# Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014, section 3.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'diff-priv-laplace-python==1.0.5'
cat > expected.txt <<'EXPECTED'
temperatures all 37.0: releases of the mean that are exactly 37 1.00, of the sum above 37 that are exactly 0 1.00, with limits of 35 and 42 0.00
temperatures one of 40.0: releases of the mean that are exactly 37 0.00, of the sum above 37 that are exactly 0 0.00, with limits of 35 and 42 0.00
incomes up to 60,000: median distance of a released sum from the sum 4.2e+05
incomes one of 10 million: median distance of a released sum from the sum 7.0e+07
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from diffpriv_laplace import DiffPrivLaplaceMechanism, DiffPrivStatistics

EPSILON, RELEASES = 0.1, 2000
healthy = np.full(100, 37.0)
one_fever = np.r_[np.full(99, 37.0), 40.0]
np.random.seed(0)
for name, table in (('all 37.0', healthy), ('one of 40.0', one_fever)):
    means = np.array([DiffPrivStatistics.mean(table, EPSILON) for _ in range(RELEASES)])
    sums = np.array([DiffPrivStatistics.sum(table - 37, EPSILON) for _ in range(RELEASES)])
    right = np.array([DiffPrivLaplaceMechanism.anonymize_mean_with_budget(table.mean(), 35.0, 42.0, 100, EPSILON)
                      for _ in range(RELEASES)])
    print(f'temperatures {name}: releases of the mean that are exactly 37 {np.mean(means == 37):.2f}, '
          f'of the sum above 37 that are exactly 0 {np.mean(sums == 0):.2f}, with limits of 35 and 42 {np.mean(right == 37):.2f}')
income = np.linspace(20_000, 60_000, 1000)
for name, table in (('up to 60,000', income), ('one of 10 million', np.r_[income[:-1], 1e7])):
    sums = np.array([DiffPrivStatistics.sum(table, EPSILON) for _ in range(RELEASES)])
    print(f'incomes {name}: median distance of a released sum from the sum {np.median(np.abs(sums - table.sum())):.1e}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

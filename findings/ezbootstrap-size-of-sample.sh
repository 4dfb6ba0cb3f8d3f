#!/usr/bin/env bash
# ezbootstrap draws samples as large as their number: the standard error of a mean of 25 values is 0.18 in
# place of 2.6, and falls as more samples are drawn.
#
# Packages: ezbootstrap 0.0.3, numpy 2.4.6, numba 0.68.1.
# Behaviour: size is documented as the number of replicates. bs_1sample and bs_2sample use it as the number of
#   values in each replicate, too. With the default of 5000, each mean is one of 5000 values. bs_pairs
#   draws as many pairs as there are.
# Expected: replicates as large as the sample, whose means have a standard deviation of s / sqrt(n).
# Why it matters here: two samples of one distribution differ significantly: the interval of the difference is
#   14 times too narrow for 25 values.
# Instead: bs_pairs(x, x, lambda a, b: mean(a)) for one sample, or scipy.stats.bootstrap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ezbootstrap==0.0.3' 'numpy==2.4.6' 'numba==0.68.1'
cat > expected.txt <<'EXPECTED'
25 values with a standard deviation of 12.8: standard error of the mean 2.57
size 2500: mean too small by a factor of about 10
size 2500: difference too small by a factor of about 10
size 10000: mean too small by a factor of about 20
size 10000: difference too small by a factor of about 20
bs_pairs, size 5000: about right
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ezbootstrap import bs_1sample, bs_2sample, bs_pairs

random = np.random.default_rng(0)
first, second = random.normal(120, 15, 25), random.normal(120, 15, 25)


def mean(values):
    return np.mean(values)


def mean_of_first(values, others):
    return np.mean(values)


def difference(values, others):
    return np.mean(values) - np.mean(others)


def describe(replicates, right):
    ratio = replicates.std() / right
    return 'about right' if 0.9 < ratio < 1.1 else f'too small by a factor of about {1 / ratio:.0f}'


one = first.std() / 5
two = np.sqrt((first.var() + second.var()) / 25)
print(f'25 values with a standard deviation of {first.std():.1f}: standard error of the mean {one:.2f}')
for size in (2500, 10_000):
    print(f'size {size}: mean', describe(bs_1sample(first, mean, size=size), one))
    print(f'size {size}: difference', describe(bs_2sample(first, second, difference, size=size), two))
print('bs_pairs, size 5000:', describe(bs_pairs(first, first, mean_of_first, size=5000), one))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The studentized interval of bootstrap-ci divides each mean by the standard error of another sample from
# 500 samples on: the lower limit for positive values is negative, and the upper one half of the right one.
#
# Packages: bootstrap-ci 0.0.1, numpy 2.4.6, numba 0.68.1, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: with 500 samples or more, more than 100 values, or use_jit, the samples within samples are
#   made by compiled code that draws samples of its own. Their standard errors are used for the means of
#   the samples drawn before, by position. With 499 samples mean and standard error are those of one
#   sample.
# Expected: in the bootstrap-t a mean and its standard error come from one sample; that they go up together
#   is what moves the interval to the right for skewed values.
# Why it matters here: 1000 samples are the default, and more samples are worse.
# Instead: at most 499 samples for 100 values or fewer, or the method bca.
# Source: Efron and Tibshirani, An Introduction to the Bootstrap, section 12.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bootstrap-ci==0.0.1' 'numpy==2.4.6' 'numba==0.68.1' 'scipy==1.17.1' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
20 values from 0.05 to 53.9, mean 4.04
by hand: lower positive, upper above 65
499 samples, three times: lower positive, upper above 65
500 samples, three times: lower negative, upper below 65
1000 samples, three times: lower negative, upper below 65
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from bootstrap_ci import Bootstrap

random = np.random.default_rng(3)
values = random.lognormal(0, 1.2, 20)


def mean(sample):
    return np.mean(sample)


def find_by_hand(samples):
    drawn = values[random.integers(0, len(values), (samples, len(values)))]
    errors = drawn.std(axis=1) / np.sqrt(len(values))
    low, high = np.quantile((drawn.mean(axis=1) - values.mean()) / errors, [0.025, 0.975])
    error = values.std() / np.sqrt(len(values))
    return values.mean() - high * error, values.mean() - low * error


def describe(limits):
    low, high = limits
    return f'lower {"negative" if low < 0 else "positive"}, upper {"above" if high > 65 else "below"} 65'


print(f'20 values from {values.min():.2f} to {values.max():.1f}, mean {values.mean():.2f}')
print('by hand:', describe(find_by_hand(4000)))
for samples in (499, 500, 1000):
    found = [describe(Bootstrap(values, mean).ci(0.95, side='two', method='studentized', seed=seed,
                                                 nr_bootstrap_samples=samples)) for seed in range(3)]
    print(f'{samples} samples, three times:', '; '.join(sorted(set(found))))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# BootCI draws samples of the first rows where a sample size is given: with half of a sorted table, the
# interval of a difference of -0.03 goes from +0.11 to +0.20.
#
# Packages: BootCI 1.0.1, numpy 2.4.6, scipy 1.17.1, pandas 3.1.1.
# Behaviour: sample_size is the size of the samples. The rows are drawn among as many first rows of the
#   table, so with 500 of 1000 rows the second half is never drawn. The difference itself is of all rows,
#   and the interval of one method does not contain it, the one of another is turned around it.
# Expected: samples of the given size from all rows, as for m out of n.
# Why it matters here: tables are sorted by outcome, hospital or time.
# Instead: leave sample_size out, or shuffle the rows and know that the others are not used.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'BootCI==1.0.1' 'numpy==2.4.6' 'scipy==1.17.1' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
difference of the accuracies: all -0.03, first half +0.15
sample size 1000: by hand -0.07 to +0.00; BootCI, sampling -0.07 to +0.01, percentile -0.07 to +0.00
sample size 500: by hand -0.08 to +0.02; BootCI, sampling +0.11 to +0.20, percentile -0.26 to -0.18
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from BootCI.paired_bootstrap_interval import Bootstrap

random = np.random.default_rng(0)
ill = np.repeat([0, 1], 500)
first = np.where(random.random(1000) < np.where(ill == 1, 0.60, 0.95), ill, 1 - ill)
second = np.where(random.random(1000) < 0.80, ill, 1 - ill)


def measure(predicted, true):
    return (predicted == true).mean()


def draw(size, samples=2000):
    drawn = random.integers(0, 1000, (samples, size))
    differences = [measure(first[rows], ill[rows]) - measure(second[rows], ill[rows]) for rows in drawn]
    return np.quantile(differences, [0.025, 0.975])


def describe(limits):
    return f'{limits[0]:+.2f} to {limits[1]:+.2f}'


print(f'difference of the accuracies: all {measure(first, ill) - measure(second, ill):+.2f}, '
      f'first half {measure(first[:500], ill[:500]) - measure(second[:500], ill[:500]):+.2f}')
np.random.seed(0)
for size in (1000, 500):
    test = Bootstrap(first, second, ill, measure, n_iter=2000, sample_size=size)
    print(f'sample size {size}: by hand {describe(draw(size))}; BootCI, sampling '
          f'{describe(test.get_confidence_interval(0.05, "sampling"))}, percentile '
          f'{describe(test.get_confidence_interval(0.05, "percentile"))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The 95 % confidence interval of foostrap for a median is the range of all its samples where the number of
# values is even: 91.3 to 111.8 in place of 96.9 to 105.3 for 50 values.
#
# Packages: foostrap 1.2.1, numpy 2.4.6, scipy 1.17.1.
# Behaviour: its default method, BCa, needs the medians of the sample without one value. foostrap takes the
#   part between two neighbours without the neighbour itself. For an even number of values all of them are 0,
#   the acceleration is 0 / 0, and the limits become the quantiles 0 and 1 without a message. For an odd
#   number they are differences and not medians.
# Expected: the interval that scipy computes by the same method.
# Why it matters here: the more samples are drawn, the wider the interval is.
# Instead: ci_method='percentile', or scipy.stats.bootstrap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'foostrap==1.2.1' 'numpy==2.4.6' 'scipy==1.17.1' 'numba==0.68.1'
cat > expected.txt <<'EXPECTED'
50 values, 1000 samples: scipy 96.9 to 105.3, foostrap 94.9 to 108.1, percentile 96.8 to 105.3, range of the samples 94.9 to 108.1
50 values, 20000 samples: scipy 96.9 to 105.3, foostrap 91.3 to 111.8, percentile 96.9 to 105.3, range of the samples 91.3 to 111.8
51 values, 1000 samples: scipy 93.6 to 105.4, foostrap 93.6 to 104.2, percentile 95.0 to 105.4, range of the samples 89.0 to 107.3
51 values, 20000 samples: scipy 93.6 to 105.4, foostrap 93.6 to 105.4, percentile 93.6 to 105.4, range of the samples 85.6 to 111.1
200 values, 1000 samples: scipy 98.2 to 104.4, foostrap 96.3 to 105.7, percentile 98.4 to 104.3, range of the samples 96.3 to 105.7
200 values, 20000 samples: scipy 98.2 to 104.4, foostrap 94.4 to 106.7, percentile 98.1 to 104.4, range of the samples 94.4 to 106.7
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from foostrap import foostrap
from scipy.stats import bootstrap

random = np.random.default_rng(0)
for number in (50, 51, 200):
    values = random.normal(100, 15, number)
    right = bootstrap((values,), np.median, method='BCa', rng=random).confidence_interval
    for samples in (1_000, 20_000):
        found = foostrap(values, statistic='quantile', boot_samples=samples, random_state=1, parallel=False)
        plain = foostrap(values, statistic='quantile', boot_samples=samples, random_state=1, parallel=False,
                         ci_method='percentile')
        print(f'{number} values, {samples} samples: scipy {right.low:.1f} to {right.high:.1f}, foostrap '
              f'{found.ci[0]:.1f} to {found.ci[1]:.1f}, percentile {plain.ci[0]:.1f} to {plain.ci[1]:.1f}, '
              f'range of the samples {found.boot_samples.min():.1f} to {found.boot_samples.max():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The one-sided test of bootstrap-CIHT finds what it is asked for in either direction: with a mean of 111
# and a null mean of 100 it is significant that the mean is greater, and that it is less.
#
# Packages: bootstrap-CIHT 0.1.1, numpy 2.4.6, pandas 3.1.1, matplotlib 3.11.2, scipy 1.17.1.
# Behaviour: calculate_hypothesis_test takes the distance of the mean from the null mean without its sign.
#   For h1_dir='less' the p-value is the share of the null distribution below the null mean minus the
#   distance, also where the mean is above. It is never larger than 0.5, and half of the two-sided one. Its
#   interval is the right one, and contradicts the p-value.
# Expected: a p-value near 1 for a difference in the other direction.
# Why it matters here: a test against harm is significant where there is benefit.
# Instead: scipy.stats.ttest_1samp or permutation_test with alternative, or the interval of calculate_CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bootstrap-CIHT==0.1.1' 'numpy==2.4.6' 'pandas==3.1.1' 'matplotlib==3.11.2' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
mean 111.3
greater than 100: t-test 0.000, bootstrap-CIHT 0.000; its interval does not contain 100
greater than 120: t-test 1.000, bootstrap-CIHT 0.000; its interval contains 120
less than 100: t-test 1.000, bootstrap-CIHT 0.000; its interval contains 100
less than 120: t-test 0.000, bootstrap-CIHT 0.000; its interval does not contain 120
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import matplotlib
import numpy as np
import pandas as pd
from scipy.stats import ttest_1samp

matplotlib.use('Agg')
from bootstrap_CIHT.bootstrap_CIHT import Bootstrap_CIHT

table = pd.DataFrame({'pressure': np.random.default_rng(0).normal(110, 10, 50)})
print(f'mean {table.pressure.mean():.1f}')
for direction in ('greater', 'less'):
    for null in (100, 120):
        with contextlib.redirect_stdout(io.StringIO()):
            test = Bootstrap_CIHT(table, 'pressure', null_mean=null, samples=500, h_sides=1, h1_dir=direction)
            means = test.get_bootstrap_sample()
            found = test.calculate_hypothesis_test(means)
            low, high = test.calculate_CI(means)
        right = ttest_1samp(table.pressure, null, alternative=direction).pvalue
        print(f'{direction} than {null}: t-test {right:.3f}, bootstrap-CIHT {found:.3f}; '
              f'its interval {"contains" if low <= null <= high else "does not contain"} {null}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

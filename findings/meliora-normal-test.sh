#!/usr/bin/env bash
# meliora's normal test of default rates cannot reject.
#
# Packages: meliora 0.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: normal_test compares predicted with realised default rates of several years. It divides
#   the square of the sum by the number of years less one, and not the whole variance, so that the
#   statistic is near 1 for any constant difference, however certain. Its p-value is the probability
#   below the absolute value of the statistic, with one degree of freedom too many, so that it grows
#   with the difference and is at least 0.5.
# Expected: the one-sided p-value, near 0 where the rates are twice the predicted ones each year.
#   The documentation says that the test is conservative, and not that it has no power.
# Instead: scipy.stats.ttest_1samp of the differences.
# Source: Basel Committee, Studies on the Validation of Internal Rating Systems, 2005, pages 48 and
#   49.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'meliora==0.1.2'
cat > expected.txt <<'EXPECTED'
predicted 2 %, realised 2.0 %: statistic -0.05, p-value 0.52; by a t-test 0.1 and 0.45
predicted 2 %, realised 2.5 %: statistic -1.04, p-value 0.84; by a t-test 10.2 and 9.2e-06
predicted 2 %, realised 4.0 %: statistic -1.08, p-value 0.84; by a t-test 40.5 and 7.2e-10
predicted 2 %, realised 8.0 %: statistic -1.08, p-value 0.84; by a t-test 121.4 and 3.4e-13
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from meliora.core import normal_test
from scipy.stats import ttest_1samp

noise = pd.Series([0.001, -0.001, 0.002, -0.002, 0.0015, -0.0005, 0.0005, -0.001])
predicted = pd.Series([0.02] * 8)
for rate in (0.02, 0.025, 0.04, 0.08):
    realised = rate + noise
    seen = normal_test(predicted, realised).iloc[0]
    right = ttest_1samp(realised - predicted, 0, alternative='greater')
    print(f'predicted 2 %, realised {100 * rate:.1f} %: statistic {seen.t_stat:.2f}, p-value {seen.p_value:.2f};',
          f'by a t-test {right.statistic:.1f} and {right.pvalue:.2g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

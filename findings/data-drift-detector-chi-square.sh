#!/usr/bin/env bash
# The chi-square test of data-drift-detector finds a drift where there is none.
#
# Packages: data-drift-detector 0.0.18, category_encoders 2.11.2, seaborn 0.13.2, scikit-learn 1.9.1,
#   scipy 1.17.1, numpy 2.4.6, pandas 2.3.3, matplotlib 3.11.2, statsmodels 0.15.0.
# Behaviour: calculate_drift scales the counts of the second table to the number of people of the first
#   one and compares them with the counts of the first one as expected frequencies. Both are samples, so
#   the statistic is (1 + first / second) times too large, twice for tables of one size, and the number of
#   people in the second table has no effect: three people can be "significant".
# Expected: 5 % of the comparisons of equal groups have a p-value below 0.05, as with a test of the table
#   of two rows.
# Instead: scipy.stats.chi2_contingency with the counts of both tables.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'seaborn==0.13.2' 'statsmodels==0.15.0' \
  'category_encoders==2.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps \
  'data-drift-detector==0.0.18'
cat > expected.txt <<'EXPECTED'
300 and 3000 equal people: significant in 4%, with a test of both samples in 2%
300 and 300 equal people: significant in 24%, with a test of both samples in 7%
3000 and 300 equal people: significant in 74%, with a test of both samples in 8%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from data_drift_detector import DataDriftDetector
from scipy.stats import chi2_contingency

random = np.random.default_rng(0)
for first, second in ((300, 3000), (300, 300), (3000, 300)):
    found, right = [], []
    for _ in range(200):
        samples = [random.choice(['a', 'b', 'c'], people) for people in (first, second)]
        tables = [pd.DataFrame({'group': pd.Series(sample, dtype=object)}) for sample in samples]
        detector = DataDriftDetector(*tables, categorical_columns=['group'], numeric_columns=[])
        found.append(detector.calculate_drift()['categorical']['group']['chi_square_test_p_value'])
        right.append(chi2_contingency([[np.sum(sample == k) for k in 'abc'] for sample in samples])[1])
    print(f'{first} and {second} equal people: significant in {np.mean(np.array(found) < 0.05):.0%}, '
          f'with a test of both samples in {np.mean(np.array(right) < 0.05):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

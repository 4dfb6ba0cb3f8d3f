#!/usr/bin/env bash
# The tests of data-drift-detector for numbers see no difference between two groups that have no value in
# common.
#
# Packages: data-drift-detector 0.0.18, category_encoders 2.11.2, seaborn 0.13.2, scikit-learn 1.9.1,
#   scipy 1.17.1, numpy 2.4.6, pandas 2.3.3, matplotlib 3.11.2.
# Behaviour: calculate_drift draws a density curve of each column and gives the heights of both curves at
#   100 places to the two-sample Kolmogorov-Smirnov test and the Wasserstein distance, which ask for
#   values. Two curves of the same shape at different places have the same heights. The test has 100
#   "values" whatever the number of people, and the distance is one of densities.
# Expected: the p-value for the values of the column, and a distance of 100 in its unit.
# Instead: scipy.stats.ks_2samp and wasserstein_distance for the columns themselves.
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
all 100 higher: data-drift-detector p 1.000, distance 0.0003; of the values p 0.000, distance 100.0
all 1000 higher: data-drift-detector p 1.000, distance 0.0021; of the values p 0.000, distance 1000.0
other people: data-drift-detector p 0.111, distance 0.0010; of the values p 0.413, distance 0.8
two people in place of 500: data-drift-detector p 0.000, distance 0.0132; of the values p 0.605, distance 6.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from data_drift_detector import DataDriftDetector
from scipy.stats import ks_2samp, wasserstein_distance

random = np.random.default_rng(0)
before = random.normal(120, 10, 500)
for name, after in (('all 100 higher', before + 100), ('all 1000 higher', before + 1000),
                    ('other people', random.normal(120, 10, 500)), ('two people in place of 500', before[:2])):
    tables = [pd.DataFrame({'pressure': values}) for values in (before, after)]
    detector = DataDriftDetector(*tables, categorical_columns=[], numeric_columns=['pressure'])
    found = detector.calculate_drift()['numerical']['pressure']
    print(f"{name}: data-drift-detector p {found['ks_2sample_test_p_value']:.3f}, distance "
          f"{found['wasserstein_distance']:.4f}; of the values p {ks_2samp(before, after)[1]:.3f}, "
          f'distance {wasserstein_distance(before, after):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The error of imbalance-metrics for rare values compares the predictions with the values of other people
# where the rows of a table were shuffled or divided: perfect predictions have an error of 13,919.
#
# Packages: imbalance-metrics 0.0.6, scikit-learn 1.6.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3.
# Behaviour: sera and ser_t number the rows of the true values anew and put the predictions beside them
#   by their index. Predictions as a Series with the index of the table, or the values themselves, are
#   then those of other rows; a test set of a larger table has an error of NaN. phi_weighted_mse and the
#   others of the package compare by position.
# Expected: 0 for perfect predictions, as for arrays.
# Why it matters here: a table is shuffled or divided before each evaluation.
# Instead: give arrays, with to_numpy().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'imbalance-metrics==0.0.6' 'scikit-learn==1.6.1' \
  'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
the table, perfect predictions: sera 0, ser_t at 0.5 0; as arrays 0 and 0; phi_weighted_mse 0
the same table, shuffled, perfect predictions: sera 13919, ser_t at 0.5 14491; as arrays 0 and 0; phi_weighted_mse 0
half of it, perfect predictions: sera nan, ser_t at 0.5 nan; as arrays 0 and 0; phi_weighted_mse 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
import pandas
from imbalance_metrics.regression_metrics import phi_weighted_mse, ser_t, sera

generator = numpy.random.default_rng(0)
values = pandas.Series(numpy.r_[generator.normal(50, 5, 95), generator.normal(100, 3, 5)])
shuffled = values.sample(frac=1, random_state=0)
for name, truth in (('the table', values), ('the same table, shuffled', shuffled), ('half of it', shuffled[:50])):
    prediction = truth.rename('prediction')
    print(f'{name}, perfect predictions: sera {sera(truth, prediction):.0f}, ser_t at 0.5 '
          f'{ser_t(truth, prediction, 0.5):.0f}; as arrays {sera(truth, prediction.to_numpy()):.0f} and '
          f'{ser_t(truth, prediction.to_numpy(), 0.5):.0f}; phi_weighted_mse {phi_weighted_mse(truth, prediction):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The expectation maximisation of impyute looks at one column alone and draws a random number from it: weights
# that follow from the height are filled in with weights of somebody else.
#
# Packages: impyute 0.0.8, numpy 1.23.5, scipy 1.10.1, scikit-learn 1.2.2.
# Behaviour: em documents the expected likelihood of the complete data and its maximum. For each missing value it
#   draws from the normal distribution of the column until one draw follows another that is not 10 % smaller.
#   The other columns are never used. Where one column is the double of the other, the values that it fills in
#   have no correlation with it and an error of 1.4 standard deviations, more than with the mean.
# Expected: as the conditional means of a normal distribution: an error of 0 here.
# Why it matters here: every relation between columns is weakened, in training data as well.
# Instead: sklearn.impute.IterativeImputer, or impyute.mice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5' 'scipy==1.10.1' 'scikit-learn==1.2.2' 'impyute==0.0.8'
cat > expected.txt <<'EXPECTED'
impyute.em: error 1.4 standard deviations, correlation with the other column -0.0
impyute.mean: error 1.0 standard deviations, correlation with the other column 0.0
IterativeImputer: error 0.0 standard deviations, correlation with the other column 1.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from impyute.imputation.cs import em, mean
from sklearn.experimental import enable_iterative_imputer
from sklearn.impute import IterativeImputer

np.random.seed(0)
first = np.random.normal(170, 10, size=2000)
whole = np.column_stack([first, 2 * first])
data = whole.copy()
missing = np.random.random(2000) < 0.3
data[missing, 1] = np.nan
for name, filled in (('impyute.em', em(data)), ('impyute.mean', mean(data)),
                     ('IterativeImputer', IterativeImputer(random_state=0).fit_transform(data))):
    values, right = filled[missing, 1], whole[missing, 1]
    error = np.sqrt(np.mean((values - right) ** 2)) / right.std()
    link = np.corrcoef(values, first[missing])[0, 1] if values.std() > 1e-9 else 0
    print(f'{name}: error {error:.1f} standard deviations, correlation with the other column {link:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# knnmv returns all columns between 0 and 1 where it is asked to fill in missing values: an age of 40 becomes 0.5.
#
# Packages: knnmv 0.0.3, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: the table is scaled with a MinMaxScaler to look for neighbours, the values are filled into the scaled
#   table, and this one is returned. transform documents "Impute all missing values in X". Values that were
#   never missing are changed as well.
# Expected: the table with the gaps filled and everything else as it was.
# Why it matters here: a model that is trained on ages and applied to 0.5 returns something all the same.
# Instead: imputer.scaler.inverse_transform, or sklearn.impute.KNNImputer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'knnmv==0.0.3'
cat > expected.txt <<'EXPECTED'
table: [[20.0, 60.0], [40.0, 70.0], [41.0, nan], [42.0, 74.0], [60.0, 90.0]]
knnmv: [[0.0, 0.0], [0.5, 0.33], [0.53, 0.4], [0.55, 0.47], [1.0, 1.0]]
scaled back: [[20.0, 60.0], [40.0, 70.0], [41.0, 72.0], [42.0, 74.0], [60.0, 90.0]]
scikit-learn: [[20.0, 60.0], [40.0, 70.0], [41.0, 72.0], [42.0, 74.0], [60.0, 90.0]]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from knnmv.impute import KNNMVImputer
from sklearn.impute import KNNImputer

# age and weight
people = np.array([[20, 60], [40, 70], [41, np.nan], [42, 74], [60, 90]], float)
filled = KNNMVImputer(k=2).fit_transform(people)
print('table:', people.tolist())
print('knnmv:', np.round(filled, 2).tolist())
imputer = KNNMVImputer(k=2)
print('scaled back:', np.round(imputer.fit(people).scaler.inverse_transform(imputer.transform(people)), 2).tolist())
print('scikit-learn:', np.round(KNNImputer(n_neighbors=2).fit_transform(people), 2).tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# knnmv leaves the nearest neighbour of a new patient out, since it takes the first of the neighbours for the patient.
#
# Packages: knnmv 0.0.3, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: transform sorts the people of the fitted table by their distance and drops the first, which is the
#   patient where the fitted table is transformed. Of a new patient it drops the most similar person. With
#   k=1 the second nearest decides. In the fitted table it drops another person where two are alike.
# Expected: the k closest samples, as documented.
# Why it matters here: people in use are new, so the values that are filled in are worse than the ones that were
#   validated on the fitted table.
# Instead: sklearn.impute.KNNImputer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'knnmv==0.0.3'
cat > expected.txt <<'EXPECTED'
k = 1: mean error 1.05, with the k nearest 0.69
k = 2: mean error 0.90, with the k nearest 0.67
k = 3: mean error 1.16, with the k nearest 0.82
somebody like the second of three: knnmv 1, scikit-learn 5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from knnmv.impute import KNNMVImputer
from sklearn.impute import KNNImputer

random = np.random.default_rng(0)

def draw(n):
    age = random.uniform(20, 80, size=n)
    return np.column_stack([age, age + random.normal(0, 0.5, size=n)])

known, new = draw(60), draw(2000)
right = new[:, 1].copy()
gaps = np.column_stack([new[:, 0], np.full(2000, np.nan)])
for k in (1, 2, 3):
    imputer = KNNMVImputer(k=k).fit(known)
    seen = imputer.scaler.inverse_transform(imputer.transform(gaps))[:, 1]
    by_hand = np.array([np.median(known[np.argsort(abs(known[:, 0] - x))[:k], 1]) for x in gaps[:, 0]])
    errors = [np.abs(values - right).mean() for values in (seen, by_hand)]
    print(f'k = {k}: mean error {errors[0]:.2f}, with the k nearest {errors[1]:.2f}')
known = np.array([[30, 1.0], [50, 5.0], [70, 9.0]])
imputer = KNNMVImputer(k=1).fit(known)
seen = imputer.scaler.inverse_transform(imputer.transform(np.array([[50.0, np.nan]])))[0, 1]
other = KNNImputer(n_neighbors=1).fit(known).transform([[50.0, np.nan]])[0, 1]
print(f'somebody like the second of three: knnmv {seen:.0f}, scikit-learn {other:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

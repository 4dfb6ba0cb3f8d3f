#!/usr/bin/env bash
# The undersampler DAU drops each row whose distance is equal to its threshold.
#
# Packages: dau-undersampler 0.1.0, scikit-learn 1.9.1, scipy 1.17.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: fit_transform takes a percentile of the mean distances to the nearest neighbours, keeps the rows above it, and
#   one row of each cluster of the rows below it. Rows that are equal to it are in neither group. With whole
#   numbers many rows have the same distance. It also takes the rows of all labels together, so that people
#   of the rare class are lost; the labels are not used.
# Expected: "Preserves outliers + keeps 1 representative per dense cluster": each row is an outlier, or has a
#   representative within eps.
# Instead: add noise that is small to the columns before, and call it with the rows of the frequent class alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dau-undersampler==0.1.0' \
  'scikit-learn==1.9.1' 'scipy==1.17.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
whole numbers: 765 of 1000 rows kept, 41 of 50 ill people; at the threshold 235; lost without a representative within 0.05: 235
with decimals: 1000 of 1000 rows kept, 50 of 50 ill people; at the threshold 1; lost without a representative within 0.05: 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from dau import DAU
from sklearn.neighbors import NearestNeighbors

random = np.random.default_rng(0)
ill = pd.Series([0] * 950 + [1] * 50)
whole = pd.DataFrame({'age': random.integers(20, 90, 1000), 'pressure': random.integers(100, 160, 1000)})
for name, people in (('whole numbers', whole), ('with decimals', whole + random.normal(0, 0.01, (1000, 2)))):
    kept, labels = DAU().fit_transform(people, ill)
    lost = people.drop(kept.index)
    distances = NearestNeighbors(n_neighbors=3).fit(people).kneighbors(people)[0].mean(axis=1)
    equal = np.isclose(distances, np.percentile(distances, 25))
    nearest = NearestNeighbors(n_neighbors=1).fit(kept).kneighbors(lost)[0] if len(lost) else np.zeros(0)
    print(f'{name}: {len(kept)} of 1000 rows kept, {labels.sum()} of 50 ill people; at the threshold {equal.sum()};',
          f'lost without a representative within 0.05: {(nearest > 0.05).sum()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

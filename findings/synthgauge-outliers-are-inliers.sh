#!/usr/bin/env bash
# synthgauge looks at everybody but the outliers where it is asked to look at the outliers.
#
# Packages: synthgauge 2.2.0, numpy 1.26.4, pandas 2.2.3, scipy 1.13.1, scikit-learn 1.5.2,
#   matplotlib 3.8.4.
# Behaviour: min_nearest_neighbour returns the smallest distance between a real and a synthetic record; by
#   default it considers the outliers of the real table only, "as these perhaps pose more of a privacy
#   concern". An outlier is where the local outlier factor is above the threshold, and synthgauge takes
#   those below it, which are the ordinary people: the record of an outlier that was copied is not seen.
# Expected: 1 outlier of 501 people, and a distance of 0 where that record was copied.
# Instead: outliers_only=False, or a selection of the real records before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'synthgauge==2.2.0' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'scikit-learn==1.5.2' 'matplotlib==3.8.4'
cat > expected.txt <<'EXPECTED'
threshold 4: 500 of 501 people are outliers, the person of 230 cm and 210 kg False
threshold 100: 501 of 501 people are outliers, the person of 230 cm and 210 kg True
with a factor above 4: 1, that person True
invented people: smallest distance 0.019, of that person by hand 170.333
with a copy of that person: smallest distance 0.019, of that person by hand 0.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from sklearn.neighbors import LocalOutlierFactor
from synthgauge.metrics import privacy

draw = np.random.RandomState(0)


def people(number):
    return pd.DataFrame({'height': draw.normal(170, 7, number), 'weight': draw.normal(70, 9, number)})


real = pd.concat([people(500), pd.DataFrame({'height': [230.0], 'weight': [210.0]})], ignore_index=True)
factors = LocalOutlierFactor(n_neighbors=5)
factors.fit_predict(real)
right = -factors.negative_outlier_factor_ > 4
for threshold in (4, 100):
    found = privacy._find_outliers(real, threshold, 5)
    print(f'threshold {threshold}: {found.sum()} of {len(real)} people are outliers,',
          f'the person of 230 cm and 210 kg {bool(found[-1])}')
print(f'with a factor above 4: {right.sum()}, that person {bool(right[-1])}')
synthetic = people(500)
copied = pd.concat([synthetic, real.tail(1)], ignore_index=True)
for name, table in (('invented people', synthetic), ('with a copy of that person', copied)):
    near = privacy.min_nearest_neighbour(real, table, threshold=4)
    alone = abs(table.to_numpy() - real.to_numpy()[-1]).sum(axis=1).min()
    print(f'{name}: smallest distance {near:.3f}, of that person by hand {alone:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

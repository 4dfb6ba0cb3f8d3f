#!/usr/bin/env bash
# The James-Stein encoder of category_encoders encodes a category that was seen once as its label.
#
# Packages: category_encoders 2.11.2, scikit-learn 1.9.1, pandas 3.1.1, numpy 2.4.6.
# Behaviour: the shrinkage comes from the variance of the labels within the category, which is 0 for
#   a single row (and for any category whose labels agree). So the smallest category is not shrunk
#   at all, and the encoder, when shared, states the outcome of one patient.
# Expected: the smaller a category, the nearer to the mean of all, as in the other encoders.
# Instead: MEstimateEncoder, or rare categories merged before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'category_encoders==2.11.2' 'scikit-learn==1.9.1' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
mean 0.104
JamesSteinEncoder large 0.106, middle 0.101, small 0.074, one patient, died 1.000, one patient, lived 0.000
MEstimateEncoder large 0.107, middle 0.100, small 0.068, one patient, died 0.552, one patient, lived 0.052
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from category_encoders import JamesSteinEncoder, MEstimateEncoder

random = np.random.default_rng(0)
hospitals = np.repeat(['large', 'middle', 'small'], [300, 100, 30])
outcome = (random.random(430) < 0.1).astype(int)
table = pd.DataFrame({'hospital': [*hospitals, 'one patient, died', 'one patient, lived']})
outcome = pd.Series([*outcome, 1, 0])
asked = table.drop_duplicates()
print(f'mean {outcome.mean():.3f}')
for kind in (JamesSteinEncoder, MEstimateEncoder):
    encoder = kind(cols=['hospital']).fit(table, outcome)
    values = encoder.transform(asked)['hospital']
    print(kind.__name__, ', '.join(f'{n} {v:.3f}' for n, v in zip(asked['hospital'], values)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

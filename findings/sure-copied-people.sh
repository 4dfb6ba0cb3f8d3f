#!/usr/bin/env bash
# clearbox-sure finds a smaller membership risk in a copy of the training table than in a copy with
# changed last digits.
#
# Packages: clearbox-sure 0.2.16, clearbox-preprocessor 0.13.0, pandas 2.2.3, polars 1.17.1, numpy
#   1.26.4, scikit-learn 1.9.1, setuptools 80.9.0 (it needs pkg_resources). It compiles a part of
#   itself at its import and needs a C compiler.
# Behaviour: the attacker calls a row a member if its distance to the nearest synthetic row is less
#   than a quantile of all distances. In a copy half of the rows have the distance 0, three of the
#   four quantiles are 0, and nothing is less than 0. The precision of no answer is counted as 0.5,
#   that of guessing.
# Expected: a risk of 1 in both cases: each member is found, and nobody else.
# Why it matters here: the score is 0 for no risk and 1 for a full leak, and the fullest leak of all
#   has 0.25. Tables with few columns of categories have many distances of 0, too.
# Instead: count the rows with distance 0 (number_of_dcr_equal_to_zero).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'polars==1.17.1' 'numpy==1.26.4' 'pyarrow==26.0.1' 'cython==3.3.1' 'scikit-learn==1.9.1' 'xgboost-cpu==3.2.0' 'lightgbm==4.7.0' 'seaborn==0.13.2' 'streamlit==1.67.0' 'tqdm==4.70.1' 'setuptools==80.9.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'clearbox-sure==0.2.16' 'clearbox-preprocessor==0.13.0'
cat > expected.txt <<'EXPECTED'
the training table: precisions [1.0, 0.5, 0.5, 0.5], risk 0.25
the training table, last digits changed: precisions [1.0, 1.0, 1.0, 1.0], risk 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import os

os.environ['HOME'] = os.getcwd()  # it compiles a part of itself there

import numpy as np
import pandas as pd
from sure.privacy import adversary_dataset, membership_inference_test

random = np.random.default_rng(0)


def people(number):
    return pd.DataFrame({'age': random.normal(50, 15, number), 'weight': random.normal(75, 12, number),
                         'creatinine': random.normal(80, 20, number)})


training, validation = people(400), people(400)
tables = {'the training table': training.copy(),
          'the training table, last digits changed': training * (1 + random.normal(0, 1e-6, training.shape))}
for name, made in tables.items():
    rows = adversary_dataset(training.copy(), validation.copy())
    members = rows['privacy_test_is_training'].to_numpy()
    result = membership_inference_test(rows, made, members, parallel=False, save_data=False)
    precisions = [round(float(value), 2) for value in result['adversary_precisions']]
    print(f'{name}: precisions {precisions}, risk {result["membership_inference_mean_risk_score"]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

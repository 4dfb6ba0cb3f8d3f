#!/usr/bin/env bash
# synthpriv measures privacy without the columns that are categories.
#
# Packages: synthpriv 0.2.1, torch 2.13.0, numpy 1.26.4, pandas 2.3.3, scipy 1.17.1, scikit-learn
#   1.9.1, sdv 1.38.5, opacus 1.6.0, anonymeter 1.1.0.
# Behaviour: mia_auc and nndr encode categories with pandas.get_dummies, said to be one-hot and
#   scaled, and keep the numeric columns of the result. pandas has made the indicators boolean since
#   version 2, so that no category is left; nothing is scaled either. A table whose synthetic
#   patients all have a disease that no real one has passes with an AUC near 0.5, where one column
#   separates them perfectly. The same disease as numbers has an AUC of 1.
# Expected: an AUC of 1 for categories as for numbers.
# Instead: encode all columns as numbers before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'synthpriv==0.2.1' 'torch==2.13.0' 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'sdv==1.38.5' 'opacus==1.6.0' 'anonymeter==1.1.0'
cat > expected.txt <<'EXPECTED'
diseases as texts: AUC of the attack 0.5, passed
diseases as numbers: AUC of the attack 1.0, failed
ages alone: AUC of the attack 0.5, passed
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

logging.disable(logging.WARNING)
import numpy as np
import pandas as pd
from synthpriv.metrics.privacy import mia_auc, nndr

random = np.random.default_rng(0)
real = pd.DataFrame({'age': random.integers(20, 80, 600).astype(float), 'disease': random.choice(['asthma', 'flu'], 600)})
synthetic = pd.DataFrame({'age': random.integers(20, 80, 600).astype(float), 'disease': ['plague'] * 600})
codes = {'asthma': 0.0, 'flu': 1.0, 'plague': 9.0}
for name, tables in (
    ('diseases as texts', (real, synthetic)),
    ('diseases as numbers', [table.assign(disease=table['disease'].map(codes)) for table in (real, synthetic)]),
    ('ages alone', (real[['age']], synthetic[['age']])),
):
    attack = mia_auc(*tables)
    print(f'{name}: AUC of the attack {attack.value:.1f}, {attack.status}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

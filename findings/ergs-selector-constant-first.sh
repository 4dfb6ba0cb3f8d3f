#!/usr/bin/env bash
# ergs-selector selects the columns that are the same for everybody.
#
# Packages: ergs-selector 0.1.2, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6, pandas 2.3.3.
# Behaviour: The score of a column is 1 less the mean overlap of the ranges of its values in the classes.
#   Where all values are equal the ranges have no length, so that no pair is counted and the overlap is
#   taken for 0: the score is 1, the one of a column that separates all classes.
# Expected: 0, or the column left out: it holds no information about the class.
# Instead: remove constant columns before (sklearn.feature_selection.VarianceThreshold).
# Source: Chandra and Gupta, An efficient statistical feature selection approach for classification of
#   gene expression data, J Biomed Inform 44 (2011).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps \
  'ergs-selector==0.1.2'
cat > expected.txt <<'EXPECTED'
marker: different values 60, score 0.88
noise: different values 60, score 0.23
ward: different values 1, score 1.00
selected: ['ward']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from ergs_selector import ERGSSelector

random = np.random.default_rng(0)
diagnosis = pd.Series(np.repeat(['a', 'b', 'c'], 20))
table = pd.DataFrame({
    'marker': np.repeat([0, 1, 2], 20) + random.normal(scale=0.6, size=60),
    'ward': np.full(60, 7.0),
    'noise': random.normal(size=60),
})
selector = ERGSSelector(top_k=1).fit(table, diagnosis)
for name, score in sorted(selector.feature_scores_.items()):
    print(f'{name}: different values {table[name].nunique()}, score {score:.2f}')
print('selected:', selector.selected_features_)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

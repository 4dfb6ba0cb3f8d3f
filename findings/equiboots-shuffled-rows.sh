#!/usr/bin/env bash
# equiboots mixes the groups up where the rows of its table were shuffled.
#
# Packages: equiboots 0.0.1a14, statsmodels 0.14.4, scikit-learn 1.7.2, scipy 1.15.2, pandas 2.2.3,
#   numpy 2.2.4, matplotlib 3.10.1, seaborn 0.13.2, tqdm 4.67.1.
# Behaviour: the people of a group are found by the labels of the index of the table, and these
#   labels are used as places in the arrays of outcomes and predictions. After pandas' sample,
#   sort_values or a split, both differ, and each group is a mixture of all people. No error is
#   raised as long as the labels are small enough.
# Expected: the rows of the table belong to the entries of the arrays in their order, as the arrays
#   have no index.
# Why it matters here: predictions are made for the test part of a split, whose table has such an
#   index, and a bias disappears.
# Instead: reset_index(drop=True) first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statsmodels==0.14.4' 'scikit-learn==1.7.2' 'scipy==1.15.2' 'pandas==2.2.3' 'numpy==2.2.4' 'matplotlib==3.10.1' 'seaborn==0.13.2' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'equiboots==0.0.1a14'
cat > expected.txt <<'EXPECTED'
in the order of the index: accuracy f 0.51, m 1.00
shuffled: accuracy f 0.90, m 0.90
shuffled, with a new index: accuracy f 0.51, m 1.00
by hand: f 0.51, m 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from equiboots import EquiBoots

random = np.random.default_rng(0)
people = pd.DataFrame({'sex': random.choice(['f', 'm'], 4000, p=[0.2, 0.8]), 'ill': random.integers(0, 2, 4000)})
wrong = (people['sex'] == 'f') & (random.random(4000) < 0.5)  # no error for men
people['found'] = np.where(wrong, 1 - people['ill'], people['ill'])
for label, table in (('in the order of the index', people), ('shuffled', people.sample(frac=1, random_state=0)),
                     ('shuffled, with a new index', people.sample(frac=1, random_state=0).reset_index(drop=True))):
    with contextlib.redirect_stdout(io.StringIO()):
        audit = EquiBoots(y_true=table['ill'].to_numpy(), y_pred=table['found'].to_numpy(), y_prob=table['found'].to_numpy().astype(float),
                          fairness_df=table[['sex']].copy(), fairness_vars=['sex'])
        audit.grouper(groupings_vars=['sex'])
        metrics = audit.get_metrics(audit.slicer('sex'))
    print(f'{label}: accuracy ' + ', '.join(f'{sex} {metrics[sex]["Accuracy"]:.2f}' for sex in 'fm'))
print('by hand: ' + ', '.join(f'{sex} {(people["ill"] == people["found"])[people["sex"] == sex].mean():.2f}' for sex in 'fm'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

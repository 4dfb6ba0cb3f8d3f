#!/usr/bin/env bash
# SynthEval finds no risk in a copy of the real table.
#
# Packages: syntheval 1.7.3, pandas 2.3.3, numpy 2.2.6, scikit-learn 1.9.1.
# Behaviour: a function for nearest neighbours leaves each row's own place out if its two tables are
#   equal, since it then takes them for one table. A synthetic table that equals the real one in
#   values and order so gets the distances within the real table: a median distance of 1 and an
#   identifiability of 0. The same rows in another order get 0 and 1. The example in its
#   documentation shows a copy with an identifiability of 0.
# Expected: the scores of the shuffled copy: each real row is there.
# Why it matters here: a generator that returns its training table passes.
# Instead: shuffle the rows before the evaluation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'syntheval==1.7.3' 'pandas==2.3.3' 'numpy==2.2.6' 'scikit-learn==1.9.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
a copy of the real table: median_DCR 1.00, eps_identif_risk 0.00, avg_nndr 0.75
the same rows, two of them exchanged: median_DCR 0.00, eps_identif_risk 1.00, avg_nndr 0.00
other people: median_DCR 0.97, eps_identif_risk 0.48, avg_nndr 0.75
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
import pandas as pd
from syntheval import SynthEval

logging.disable(logging.CRITICAL)
random = np.random.default_rng(0)


def people(number):
    return pd.DataFrame({'age': random.normal(50, 15, number), 'weight': random.normal(75, 12, number),
                         'creatinine': random.normal(80, 20, number)})


real = people(200)
tables = {
    'a copy of the real table': real.copy(),
    'the same rows, two of them exchanged': real.iloc[[1, 0, *range(2, 200)]].reset_index(drop=True),
    'other people': people(200),
}
for name, table in tables.items():
    judge = SynthEval(real.copy(), cat_cols=[], verbose=False, console='off', enable_plots=False)
    scores = judge.evaluate(table, dcr={}, eps_risk={}, nndr={}).set_index('metric')
    print(f'{name}:', ', '.join(f'{key} {value:.2f}' for key, value in scores['val'].items()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

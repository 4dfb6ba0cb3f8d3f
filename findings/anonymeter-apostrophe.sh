#!/usr/bin/env bash
# anonymeter finds no risk in a copied table whose diagnoses have an apostrophe.
#
# Packages: anonymeter 1.1.0, polars 2.1.0, pandas 2.3.3, numpy 1.26.4.
# Behaviour: the attacker of SinglingOutEvaluator combines values of a synthetic row, such as
#   diagnosis and age, and looks whether they describe one person of the real table. Apostrophes and
#   quotes of a text get a backslash before the comparison, as a query in text would need; the
#   comparison needs none, so such a text is equal to no text. A log line of the level warning says
#   that fewer attacks than asked for were generated.
# Expected: the same risk, whatever the name of the disease.
# Why it matters here: Crohn's, Alzheimer's, Parkinson's, Hodgkin's and O'Brien are left out of the
#   test.
# Instead: codes in place of names, or str.replace("'", '’').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'anonymeter==1.1.0' 'polars==2.1.0' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
Crohn's disease: 0 of 100 attacks single out a person, risk 0.02
Crohn disease: 78 of 100 attacks single out a person, risk 0.77
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
import pandas as pd
from anonymeter.evaluators import SinglingOutEvaluator

logging.disable(logging.CRITICAL)


def people(name):
    random = np.random.default_rng(0)
    stages = [f'{name}, stage {number}' for number in range(40)]
    return pd.DataFrame({'diagnosis': random.choice(stages, 500), 'age': random.integers(20, 90, 500)})


for name in ("Crohn's disease", 'Crohn disease'):
    table = people(name)  # the synthetic table is a copy of the real one
    judge = SinglingOutEvaluator(table, table.copy(), n_attacks=100, n_cols=2, max_attempts=2000, seed=0)
    judge.evaluate(mode='multivariate')
    print(f'{name}: {len(judge.queries())} of 100 attacks single out a person, risk {judge.risk().value:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

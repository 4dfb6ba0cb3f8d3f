#!/usr/bin/env bash
# synthpriv makes independent columns with repeated values dependent.
#
# Packages: synthpriv 0.2.1, torch 2.13.0, numpy 1.26.4, pandas 2.3.3, scipy 1.17.1, scikit-learn
#   1.9.1, sdv 1.38.5, opacus 1.6.0, anonymeter 1.1.0.
# Behaviour: DPCopulaGenerator takes ranks with argsort, which gives equal values different ranks by
#   their rows. Two columns that are mostly 0 have nearly the same ranks, whatever their ones are.
#   Two independent diseases with a correlation of 0.00 have a copula with one above 0.5, with
#   almost no noise (epsilon 1000), and synthetic patients who have the second disease several times
#   as often if they have the first. Two constant columns have a correlation of 1. Decimals that do
#   not repeat are right.
# Expected: a correlation near 0, with ties ranked at random or by their mean.
# Instead: add noise that is small against the unit to columns of whole numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'synthpriv==0.2.1' 'torch==2.13.0' 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'sdv==1.38.5' 'opacus==1.6.0' 'anonymeter==1.1.0'
cat > expected.txt <<'EXPECTED'
two diseases: correlation of the table 0.0, of the copula above 0.5: True; second disease more than three times as often with the first: True
with small noise: correlation of the table 0.0, of the copula above 0.5: False; second disease more than three times as often with the first: False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

logging.disable(logging.INFO)
import numpy as np
import pandas as pd
from synthpriv import DPCopulaGenerator, DPSGD

random = np.random.default_rng(0)
diseases = pd.DataFrame({name: (random.random(2000) < 0.05).astype(int) for name in ('first', 'second')})
tables = {'two diseases': diseases, 'with small noise': diseases + random.uniform(-0.01, 0.01, diseases.shape)}
for name, table in tables.items():
    bounds = {column: (-0.02, 1.02) for column in table}
    generator = DPCopulaGenerator(privacy=DPSGD(epsilon=1000.0), bounds=bounds).fit(table)
    synthetic = generator.sample(20000) > 0.5
    risk = synthetic.groupby('first')['second'].mean()
    print(f"{name}: correlation of the table {abs(table.corr().iloc[0, 1]):.1f}, of the copula above 0.5:",
          f"{generator._corr[0, 1] > 0.5}; second disease more than three times as often with the first: {risk[True] > 3 * risk[False]}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The second sampler of PyImbalReg works on the table of the first one.
#
# Packages: PyImbalReg 0.0.3, scipy 1.17.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: the table, its target and all settings are attributes of the class DataHandler, which every
#   sampler inherits, and they are set where no sampler was made before. A second sampler ignores all of
#   its arguments, without a message: the rows, the threshold and the percentage are the ones of the
#   first. In a cross-validation all folds are given the rows of the first table, people who were held out
#   with them.
# Expected: the rows of the table that is passed: "Passing the data".
# Instead: a new process for each table.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyImbalReg==0.0.3' 'scipy==1.17.1' \
  'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
asked for hospital A with 500 patients: 520 rows, of hospital A; percentage 2
asked for hospital B with 50 patients: 520 rows, of hospital A; percentage 2
asked for hospital C with 5000 patients: 520 rows, of hospital A; percentage 2
fold 1: of 100 patients that were held out 99 are in the training data
fold 2: of 100 patients that were held out 100 are in the training data
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from PyImbalReg import RandomOversampling

random = np.random.default_rng(0)
np.random.seed(0)
hospitals = {name: pd.DataFrame({'hospital': name, 'age': random.integers(20, 90, size), 'cost': random.lognormal(5, 1, size)})
             for name, size in (('A', 500), ('B', 50), ('C', 5000))}
for name, factor in (('A', 2), ('B', 5), ('C', 2)):
    sampler = RandomOversampling(df=hospitals[name].copy(), y_col='cost', rel_func='default', threshold=0.7,
                                 o_percentage=factor, categorical_columns=['hospital'])
    result = sampler.get()
    print(f'asked for hospital {name} with {len(hospitals[name])} patients: {len(result)} rows,',
          f'of hospital {", ".join(sorted(set(result.hospital)))}; percentage {sampler.o_percentage}')
folds = np.arange(500) % 5
for fold in range(2):
    train = hospitals['A'][folds != fold]
    result = RandomOversampling(df=train.copy(), y_col='cost', rel_func='default', threshold=0.7, o_percentage=2).get()
    held_out = set(hospitals['A'][folds == fold].cost)
    print(f'fold {fold + 1}: of 100 patients that were held out {len(held_out & set(result.cost))} are in the training data')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

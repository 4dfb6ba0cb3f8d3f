#!/usr/bin/env bash
# train_test_split of PyImbalReg loses each row whose target is on the edge of one of its classes.
#
# Packages: PyImbalReg 0.0.3, scipy 1.17.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: the function takes (y > left) & (y < right) for each class of numpy.histogram, whose first
#   edge is the smallest value and whose last edge is the largest one. These two are lost always, and
#   whole numbers where the edges are whole. The number of classes that it asks for is not used: there are
#   always ten.
# Expected: "randomly split the data so the distribution of the test_set and the train set are similar":
#   each row is in one of them. The package is about the extreme values, which are the ones that are lost.
# Instead: sklearn.model_selection.train_test_split with stratify=pandas.cut(y, bins, labels=False).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyImbalReg==0.0.3' 'scipy==1.17.1' \
  'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
0 to 10 days: of 500 people 0 in training, 0 in test; smallest and largest value in either: 0 of 2
0 to 20 days: of 500 people 172 in training, 42 in test; smallest and largest value in either: 0 of 2
cost: of 500 people 400 in training, 98 in test; smallest and largest value in either: 0 of 2
cost, bins=2: 98 in test
cost, bins=10: 98 in test
cost, bins=200: 98 in test
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from PyImbalReg import train_test_split

random = np.random.default_rng(0)
targets = {'0 to 10 days': random.integers(0, 11, 500), '0 to 20 days': random.integers(0, 21, 500),
           'cost': random.lognormal(5, 1, 500)}
for name, target in targets.items():
    people = pd.DataFrame({'age': random.integers(20, 90, 500), 'target': target})
    train, test = train_test_split(people, test_size=0.2, bins=10, random_state=1)
    ends = {people.target.min(), people.target.max()} & set(pd.concat([train, test]).target)
    print(f'{name}: of 500 people {len(train)} in training, {len(test)} in test;',
          f'smallest and largest value in either: {len(ends)} of 2')
for bins in (2, 10, 200):
    print(f'cost, bins={bins}: {len(train_test_split(people, test_size=0.2, bins=bins, random_state=1)[1])} in test')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The embargo of cpcv removes everything between the first and the last test fold from the training data.
#
# Packages: cpcv 0.1.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: CPCV(n_folds, test_size, embargo_pct) takes the embargo from the first row of all test folds minus its size to the
#   last row plus its size. The folds between two test folds are in it. With folds 1 and 5 as test no row is
#   left, and an empty table comes back without a message. Without an embargo all three other folds
#   are there. It is also one row shorter behind the test than before it.
# Expected: "Fraction of test set length to embargo on each side": on each side of each test fold, as in the
#   method that it documents.
# Instead: from each test fold by itself, remove the rows that follow it.
# Source: López de Prado, Advances in Financial Machine Learning, 2018, chapters 7 and 12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cpcv==0.1.0' 'pandas==2.3.3' \
  'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
embargo of 0 rows
  test folds 1 and 2: training rows 600, by definition 600
  test folds 1 and 3: training rows 600, by definition 600
  test folds 1 and 4: training rows 600, by definition 600
  test folds 1 and 5: training rows 600, by definition 600
  test folds 2 and 3: training rows 600, by definition 600
  test folds 2 and 4: training rows 600, by definition 600
  test folds 2 and 5: training rows 600, by definition 600
  test folds 3 and 4: training rows 600, by definition 600
  test folds 3 and 5: training rows 600, by definition 600
  test folds 4 and 5: training rows 600, by definition 600
embargo of 4 rows
  test folds 1 and 2: training rows 597, by definition 596
  test folds 1 and 3: training rows 397, by definition 588
  test folds 1 and 4: training rows 197, by definition 588
  test folds 1 and 5: training rows 0, by definition 592
  test folds 2 and 3: training rows 593, by definition 592
  test folds 2 and 4: training rows 393, by definition 584
  test folds 2 and 5: training rows 196, by definition 588
  test folds 3 and 4: training rows 593, by definition 592
  test folds 3 and 5: training rows 396, by definition 588
  test folds 4 and 5: training rows 596, by definition 596
one test fold, embargo of 10 rows: 10 before it and 9 behind it
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import itertools

import numpy as np
import pandas as pd
from cpcv import CPCV

table = pd.DataFrame({'row': range(1000)})
pairs = list(itertools.combinations(range(5), 2))
for share in (0.0, 0.01):
    size = int(400 * share)
    print(f'embargo of {size} rows')
    for pair, (train, test) in zip(pairs, CPCV(5, 2, share).split(table)):
        near = np.concatenate([np.arange(200 * fold - size, 200 * fold + 200 + size) for fold in pair])
        right = len(set(range(1000)) - set(near))
        print(f'  test folds {pair[0] + 1} and {pair[1] + 1}: training rows {len(train)}, by definition {right}')
train, test = CPCV(5, 1, 0.05).split(table)[2]
before, behind = train.row[train.row < test.row.min()].max(), train.row[train.row > test.row.max()].min()
print(f'one test fold, embargo of 10 rows: {test.row.min() - before - 1} before it and {behind - test.row.max() - 1} behind it')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

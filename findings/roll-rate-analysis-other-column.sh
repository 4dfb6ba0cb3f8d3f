#!/usr/bin/env bash
# roll-rate-analysis takes other columns for the delinquency where their names begin alike.
#
# Packages: roll-rate-analysis 0.2.0, polars 1.37.1, numpy 1.26.4.
# Behaviour: SnapshotRollRateTable takes the largest value of all columns whose names begin with the name of
#   the delinquency column. A file with "delq" and "delq_amount" has its amounts taken for months past due,
#   and accounts of which none was ever late are in the worst state. keep_cols hides it, though it is
#   documented to save memory.
# Expected: the months past due alone.
# Instead: pass keep_cols with the delinquency column alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'roll-rate-analysis==0.2.0' 'polars==1.37.1' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
keep_cols=None: 0 to 0: 1 3 to 3: 3
keep_cols=('delq',): 0 to 0: 2 1 to 1: 1 3 to 3: 1
by hand: 0 to 0: 2 1 to 1: 1 3 to 3: 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import polars as pl
from roll_rate_analysis import SnapshotRollRateTable

snapshot = pl.DataFrame({'id': [1, 2, 3, 4]})
months = [pl.DataFrame({'id': [1, 2, 3, 4], 'delq': late, 'delq_amount': owed})
          for late, owed in (([0, 0, 1, 2], [0, 12, 90, 180]), ([0, 0, 0, 3], [0, 15, 0, 260]))]
after = [pl.DataFrame({'id': [1, 2, 3, 4], 'delq': late, 'delq_amount': owed})
         for late, owed in (([0, 0, 0, 3], [0, 9, 0, 255]), ([0, 0, 1, 1], [0, 11, 85, 80]))]
hand = {}
for account in range(4):
    states = [max(frame['delq'][account] for frame in frames) for frames in (months, after)]
    hand[tuple(states)] = hand.get(tuple(states), 0) + 1
for kept in (None, ('delq',)):
    seen = SnapshotRollRateTable(snapshot, months, after, unique_key_col='id', delinquency_col='delq',
                                 max_delq=3, keep_cols=kept).compute()
    print(f'keep_cols={kept}:', *[f'{row} to {column}: {seen[seen.columns[column + 1]][row]}'
                                  for row in range(4) for column in range(4) if seen[seen.columns[column + 1]][row]])
print('by hand:', *[f'{row} to {column}: {count}' for (row, column), count in sorted(hand.items())])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

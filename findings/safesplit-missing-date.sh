#!/usr/bin/env bash
# The chronological split of safesplit loses and repeats people where a date is missing, and no longer
# splits by time.
#
# Packages: safesplit 0.3.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: safe_split(df, time_col=...) reads the dates with errors="coerce" and takes
#   Series.argsort of them for the order. In pandas 2 this has -1 where a date is missing, and the places
#   among the dates that are not missing for all others. iloc[-1] is the last row, which so comes in once
#   for each missing date, and all other rows are shifted. There is no message (the warning of pandas
#   is about a later version).
# Expected: "leakage-safe train/test splits": train is the past and test the future, and each person is in
#   one of them. Without a missing date they are.
# Why it matters here: a person who is there twelve times has twelve times the influence that a
#   bound of their gradient promises.
# Instead: drop the rows without a date first, or sort with sort_values(time_col).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'safesplit==0.3.0' 'pandas==2.3.3' \
  'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
0 dates missing: 80 and 20 rows; in neither part 0 people, most often 1 times; training to 21 March, test from 22 March
1 dates missing: 80 and 20 rows; in neither part 0 people, most often 1 times; training to 10 April, test from 01 February
3 dates missing: 80 and 20 rows; in neither part 2 people, most often 3 times; training to 10 April, test from 10 January
12 dates missing: 80 and 20 rows; in neither part 11 people, most often 12 times; training to 10 April, test from 07 January
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from safesplit import safe_split

random = np.random.default_rng(0)
days = pd.Series(pd.date_range('2026-01-01', periods=100).to_numpy()[random.permutation(100)])
for missing in (0, 1, 3, 12):
    people = pd.DataFrame({'person': range(100), 'day': days})
    people.loc[random.choice(99, missing, replace=False), 'day'] = None
    train, test = safe_split(people, 0.2, time_col='day')
    counts = pd.concat([train, test]).person.value_counts()
    print(f'{missing} dates missing: {len(train)} and {len(test)} rows; in neither part {100 - len(counts)} people, most often',
          f'{counts.max()} times; training to {train.day.max():%d %B}, test from {test.day.min():%d %B}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

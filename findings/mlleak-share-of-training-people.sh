#!/usr/bin/env bash
# The risk score of mlleak is 3 of 100, "low risk", where each test patient is in the training data as well.
#
# Packages: mlleak 0.1.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: For groups, report divides the number of common people by the number of people in the training data: of 10,000,
#   a hundred test patients are 1 %, and the score is 3. With as many people in both parts it is 30. For times it
#   divides the early rows by the length of its own dictionary of results, which has 7 entries, so that one row before the
#   last training row has the whole 30 points, in a test set of any size. For equal rows it counts pairs:
#   10 test rows are "500 duplicate rows", 5,000 % of the test data.
# Expected: a share of the test set: a score "from 0 (no risk) to 100 (critical risk)" that is the same for a test set whose
#   people are all known, however large the training data are, and grows with the number of early rows.
# Instead: look at the entries passed, overlap_count and leakage_count alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mlleak==0.1.1' 'pandas==2.3.3' \
  'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
training 100 patients, test 100, common 100: share of them 100.0 %, risk score 30
training 1000 patients, test 100, common 100: share of them 10.0 %, risk score 30
training 10000 patients, test 100, common 100: share of them 1.0 %, risk score 3
1 of 1000 test rows before the last training row: risk score 30
999 of 1000 test rows before the last training row: risk score 30
duplicates of 10 test rows: 500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mlleak
import pandas as pd

for people in (100, 1000, 10000):
    train = pd.DataFrame({'patient': range(people), 'value': range(people)})
    test = pd.DataFrame({'patient': range(100), 'value': range(-100, 0)})
    result = mlleak.report(train, test, group_cols=['patient'], verbose=False)
    found = result['group_check']['group_results']['patient']
    print(f'training {people} patients, test 100, common {found["overlap_count"]}: share of them',
          f'{found["overlap_percentage"]} %, risk score {result["risk_score"]}')
hours = pd.date_range('2026-01-01', periods=2000, freq='h')
for early, size in ((1, 1000), (1000, 1000)):
    train = pd.DataFrame({'time': hours[:1000], 'value': range(1000)})
    test = pd.DataFrame({'time': list(hours[:early]) + list(hours[1000 + early:]), 'value': range(-1000, 0)})
    result = mlleak.report(train, test, time_col='time', verbose=False)
    print(f'{result["time_check"]["leakage_count"]} of {size} test rows before the last training row: risk score {result["risk_score"]}')
train = pd.DataFrame({'sex': ['f', 'm'] * 50})
print('duplicates of 10 test rows:', mlleak.report(train, train.head(10), verbose=False)['duplicate_check']['duplicate_count'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

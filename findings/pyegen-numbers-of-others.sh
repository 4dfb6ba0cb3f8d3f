#!/usr/bin/env bash
# The group and sequence numbers of pyegen belong to other people where rows were filtered or
# mixed.
#
# Packages: pyegen 0.2.4, pandas 2.3.3, numpy 2.3.3.
# Behaviour: group returns its numbers with a new index from 0 on, so that pandas puts them into
#   other rows of a table that was filtered or sorted, or leaves them missing. seq with groups
#   appends the sequence of each group to the one before, in the order of the groups and not of the
#   rows: visits of two patients that come by turns are numbered 1 2 3 1 2 3.
# Expected: the number of the group of each row, and of the visit within its patient: "Equivalent
#   to Stata's: egen newvar = group(var1 var2)".
# Instead: table.groupby(columns).ngroup() + 1, and table.groupby(column).cumcount() + 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'pyegen==0.2.4'
cat > expected.txt <<'EXPECTED'
adults, ward and group: [('A', 2.0), ('B', 2.0), ('B', 3.0), ('C', 3.0), ('C', nan)]
right: [1, 2, 2, 3, 3]
oldest first: [('C', 3), ('C', 3), ('B', 2), ('B', 2), ('A', 1), ('A', 1)]
visits of ['P', 'Q', 'P', 'Q', 'P', 'Q'] [1, 2, 3, 1, 2, 3] right [1, 1, 2, 2, 3, 3]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyegen

people = pd.DataFrame({'ward': ['A', 'A', 'B', 'B', 'C', 'C'], 'age': [15, 40, 50, 60, 70, 80]})
adults = people[people['age'] >= 18].copy()
adults['group'] = pyegen.group(adults, ['ward'])
adults['right'] = adults.groupby('ward').ngroup() + 1
print('adults, ward and group:', [(ward, group) for ward, group in zip(adults['ward'], adults['group'])])
print('right:', adults['right'].tolist())
turned = people.sort_values('age', ascending=False).copy()
turned['group'] = pyegen.group(turned, ['ward'])
print('oldest first:', [(ward, int(group)) for ward, group in zip(turned['ward'], turned['group'])])
visits = pd.DataFrame({'patient': ['P', 'Q', 'P', 'Q', 'P', 'Q']})
visits['visit'] = [int(number) for number in visits.groupby('patient').cumcount() + 1]
length = pd.Series(range(6))
try:
    made = pyegen.seq(length=3, to_val=3, by=visits['patient']).tolist()
except Exception as error:
    made = type(error).__name__
print('visits of', visits['patient'].tolist(), made, 'right', visits['visit'].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

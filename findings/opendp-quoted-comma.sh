#!/usr/bin/env bash
# OpenDP splits a CSV record at a comma within quotes, so that a column holds values of its
# neighbour.
#
# Packages: opendp 0.16.0.
# Behaviour: make_split_dataframe cuts each line at every separator. For the name "Roe, J", the name
#   becomes the first half and the age the second half, which casts to the default 0; a line break
#   within quotes begins a new record. The private sum is wrong, and no message says so.
# Expected: quotes as in RFC 4180, which every spreadsheet writes for names with a comma.
# Instead: read the file with a CSV reader, and give OpenDP the column.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'opendp==0.16.0'
cat > expected.txt <<'EXPECTED'
id: OpenDP ['1', '2', '3', 'ward 2"']
name: OpenDP ['Doe', '"Roe', '"Poe', '70']
age: OpenDP ['61', 'J"', '', '']
sum of ages: OpenDP 61 csv 185
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import csv
import io

import opendp.prelude as dp

dp.enable_features('contrib')
text = '1,Doe,61\n2,"Roe, J",54\n3,"Poe\nward 2",70\n'
columns = ['id', 'name', 'age']
frame = dp.t.make_split_dataframe(separator=',', col_names=columns)
for name in columns:
    column = frame >> dp.t.make_select_column(name, str)
    print(f'{name}: OpenDP {column(text)}')
ages = frame >> dp.t.make_select_column('age', str) >> dp.t.then_cast_default(TOA=int)
print('sum of ages: OpenDP', sum(ages(text)), 'csv', sum(int(row[2]) for row in csv.reader(io.StringIO(text))))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

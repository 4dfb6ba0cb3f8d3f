#!/usr/bin/env bash
# dsjson rounds large identifiers, writes whole numbers as decimals and calls some numbers text.
#
# Packages: dsjson 1.2, pandas 2.3.3, numpy 2.3.3.
# Behaviour: the rows are taken from the values of the whole table, which have one type. In a table
#   of numbers with one decimal column all of them become double precision: sequence numbers are
#   1.0 and 2.0 in columns that are declared integer, and identifiers of 17 digits become others,
#   two of them the same one. Columns of the types Int64, which pandas has for whole numbers with
#   missing values, int32 and float32 are declared as string, with numbers in the rows.
# Expected: the values of the table, and the data type of each column, as in CDISC Dataset-JSON
#   1.1.
# Instead: data.astype(object) before to_dataset_json, and the types of the columns by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'dsjson==1.2'
cat > expected.txt <<'EXPECTED'
numbers alone
  SAMPLEID: declared integer, table [90071992547409921, 90071992547409923]
  VSSEQ: declared integer, table [1, 2]
  VSSTRESN: declared float, table [36.6, 37.1]
  rows [[9.007199254740992e+16, 1.0, 36.6], [9.007199254740992e+16, 2.0, 37.1]]
the same as objects
  SAMPLEID: declared string, table [90071992547409921, 90071992547409923]
  VSSEQ: declared string, table [1, 2]
  VSSTRESN: declared float, table [36.6, 37.1]
  VSTEST: declared string, table ['TEMP', 'TEMP']
  rows [[90071992547409921, 1, 36.6, "TEMP"], [90071992547409923, 2, 37.1, "TEMP"]]
ages with a missing value
  USUBJID: declared string, table ['A', 'B']
  AGE: declared string, table [61, <NA>]
  VISITNUM: declared string, table [1, 2]
  rows [["A", 61, 1], ["B", null, 2]]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import json

import pandas as pd
from dsjson import make_column_metadata, to_dataset_json


def show(label, table):
    columns = make_column_metadata(table, {}, 'VS')
    made = to_dataset_json(table, columns, name='VS', label='Vital signs', itemGroupOID='IG.VS')
    print(label)
    for column in made['columns']:
        print(f"  {column['name']}: declared {column['dataType']}, table {table[column['name']].tolist()}")
    print('  rows', json.dumps(made['rows']))


numbers = pd.DataFrame({'SAMPLEID': [90071992547409921, 90071992547409923], 'VSSEQ': [1, 2], 'VSSTRESN': [36.6, 37.1]})
show('numbers alone', numbers)
show('the same as objects', numbers.assign(VSTEST='TEMP').astype({'SAMPLEID': object, 'VSSEQ': object}))
few = pd.DataFrame({'USUBJID': ['A', 'B'], 'AGE': pd.array([61, None], dtype='Int64'),
                    'VISITNUM': pd.array([1, 2], dtype='int32')})
show('ages with a missing value', few)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

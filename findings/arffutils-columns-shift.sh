#!/usr/bin/env bash
# arffutils drops the columns of an ARFF file that are declared as REAL, and gives the others their
# values.
#
# Packages: arffutils 0.1.1, pandas 2.3.3, numpy 2.3.3, liac-arff 2.5.0 (reads the files).
# Behaviour: arff_to_pandas_dataframe knows the types NUMERIC, STRING and nominal. An attribute of
#   another type, such as REAL, INTEGER or DATE, is left out of the names and not out of the data:
#   the first column becomes the index of the table, and the columns up to it have the values of
#   the next one. A name with a space is written without quotes and read as its first word, with
#   the second one as its type, and the same follows.
# Expected: the columns of the file: "Converts an ARFF file to a pandas DataFrame". REAL and
#   INTEGER are types of ARFF, and Weka's own iris.arff has REAL.
# Why it matters here: the weight is in the column of the age, without an error.
# Instead: liac-arff, or scipy.io.arff.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'liac-arff==2.5.0' 'arffutils==0.1.1'
cat > expected.txt <<'EXPECTED'
liac-arff: {'age': [61.0, 34.0], 'weight': [71.5, 82.0], 'ward': ['A', 'B']}
arffutils, with REAL: {'age': [71.5, 82.0], 'ward': ['A', 'B']} index [61, 34]
written table: {'age': [61, 34], 'blood pressure': [121.5, 142.0], 'pulse': [70, 80]}
arffutils, a name with a space: {'age': [121.5, 142.0], 'pulse': [70.0, 80.0]} index [61, 34]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import arff
import pandas as pd
from arffutils import arff_to_pandas_dataframe, pandas_dataframe_to_arff

text = """@RELATION people
@ATTRIBUTE age NUMERIC
@ATTRIBUTE weight REAL
@ATTRIBUTE ward {A,B}
@DATA
61,71.5,A
34,82.0,B
"""
with open('people.arff', 'w') as file:
    file.write(text)
for label, path in (('with REAL', 'people.arff'), ('a name with a space', 'written.arff')):
    if path == 'written.arff':
        people = pd.DataFrame({'age': [61, 34], 'blood pressure': [121.5, 142.0], 'pulse': [70, 80]})
        pandas_dataframe_to_arff(people, path)
        print('written table:', people.to_dict('list'))
    else:
        loaded = arff.loads(text)
        print('liac-arff:', {name: [row[place] for row in loaded['data']]
                             for place, (name, _) in enumerate(loaded['attributes'])})
    table = arff_to_pandas_dataframe(path)
    print(f'arffutils, {label}:', table.to_dict('list'), 'index', table.index.tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

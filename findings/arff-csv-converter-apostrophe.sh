#!/usr/bin/env bash
# arff-csv-converter loses each diagnosis with an apostrophe from a file that it wrote itself.
#
# Packages: arff-csv-converter 1.1.0, pandas 2.3.3, numpy 2.3.3.
# Behaviour: the writer puts values with an apostrophe into quotes and a backslash before it, as
#   ARFF asks. The reader does not know the backslash: it keeps it in a text, drops the apostrophe
#   of a nominal value and not the one in the data, so that they differ, and the value becomes
#   missing. So it is where the last column has the apostrophe; in another one the file is refused.
# Expected: the values that were written.
# Why it matters here: "Crohn's disease" and "Alzheimer's disease" are missing values afterwards,
#   and people without a diagnosis.
# Instead: liac-arff for reading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'liac-arff==2.5.0' 'arff-csv-converter==1.1.0'
cat > expected.txt <<'EXPECTED'
nominal ["34,'Crohn\\'s disease'", '51,Influenza', "80,'Alzheimer\\'s disease'", '22,Influenza']
  read back: [None, 'Influenza', None, 'Influenza']
  by liac-arff: ["Crohn's disease", 'Influenza', "Alzheimer's disease", 'Influenza']
text ["34,'Crohn\\'s disease'", '51,Influenza', "80,'Alzheimer\\'s disease'", '22,Influenza']
  read back: ["Crohn\\'s disease", 'Influenza', "Alzheimer\\'s disease", 'Influenza']
  by liac-arff: ["Crohn's disease", 'Influenza', "Alzheimer's disease", 'Influenza']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import arff
import pandas as pd
from arff_csv.parser import ArffParser
from arff_csv.writer import ArffWriter

ill = ["Crohn's disease", 'Influenza', "Alzheimer's disease", 'Influenza']
people = pd.DataFrame({'age': [34, 51, 80, 22], 'ill': pd.Categorical(ill)})

for label, table in (('nominal', people), ('text', people.astype({'ill': object}))):
    text = ArffWriter().write_string(table, relation_name='people')
    print(label, text.strip().splitlines()[-4:])
    back = ArffParser().parse_string(text).data['ill'].tolist()
    print('  read back:', [None if value != value else value for value in back])
    print('  by liac-arff:', [row[1] for row in arff.loads(text)['data']])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

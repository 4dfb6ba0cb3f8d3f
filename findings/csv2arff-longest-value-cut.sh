#!/usr/bin/env bash
# csv2arff cuts the longest texts of a table where it puts them into quotes.
#
# Packages: csv2arff 2.0, numpy 2.3.3, liac-arff 2.5.0 (reads the files).
# Behaviour: the table is an array of texts with the length of its longest cell. The two quotes
#   that are put around each nominal value do not fit where the value has this length, or one less:
#   the closing quote is lost, and the last letter. The values of the attribute are declared in
#   full, so that the data are not among them, and other readers refuse the file.
# Expected: the values of the table. A column with a longer name or text, or a longer cell in any
#   other column, makes the difference.
# Instead: another converter, or a column with a long name that is removed afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.3.3' 'csv2arff==2.0' 'liac-arff==2.5.0'
cat > expected.txt <<'EXPECTED'
longest cell: pneumonia
  @attribute age numeric
  @attribute ill {'influenza','pneumonia'}
  @data
  61,'pneumoni
  34,'influenz
  52,'influenz
  liac-arff: BadLayout
the same with a longer name of a column
  @attribute age_in_years numeric
  @attribute ill {'influenza','pneumonia'}
  @data
  61,'pneumonia'
  34,'influenza'
  52,'influenza'
  read by liac-arff: [[61.0, 'pneumonia'], [34.0, 'influenza'], [52.0, 'influenza']]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import subprocess

import arff


def convert(table):
    with open('people.csv', 'w') as file:
        file.write(table)
    subprocess.run(['env/bin/csv2arff', 'people.csv', 'people.arff', '-n', 'people'], check=True)
    text = open('people.arff').read()
    for line in text.splitlines():
        if line and not line.startswith('@relation'):
            print(' ', line)
    try:
        print('  read by liac-arff:', arff.loads(text)['data'])
    except arff.ArffException as error:
        print('  liac-arff:', type(error).__name__)


print('longest cell: pneumonia')
convert('age,ill\n61,pneumonia\n34,bronchitis\n52,bronchitis\n'.replace('bronchitis', 'influenza'))
print('the same with a longer name of a column')
convert('age in years,ill\n61,pneumonia\n34,influenza\n52,influenza\n'.replace(' in ', '_in_'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

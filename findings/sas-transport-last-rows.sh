#!/usr/bin/env bash
# pandas.read_sas loses or adds rows at the end of a short SAS transport file.
#
# Packages: pandas 3.1.1, pyreadstat 1.3.7 (writes the files, and reads them for comparison).
# Behaviour: in a table of short rows, a last row whose last column is an empty text is dropped when
#   the space that is left in the final 80-byte card could hold such a row; where the last cell is
#   filled, a row of blanks is added instead. No error, no warning.
# Expected: as many rows as were written. Seen with pyreadstat, which reads all of them.
# Instead: read transport files with pyreadstat.read_xport, and compare the number of rows with the
#   source.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'pyreadstat==1.3.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
rows written 3, pandas 2 pyreadstat 3 ['fever', 'cough', '']
rows written 3, pandas 2 pyreadstat 3 ['fever', '', '']
rows written 3, pandas 4 pyreadstat 3 ['fever', 'cough', 'rash']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyreadstat

for notes in (['fever', 'cough', ''], ['fever', '', ''], ['fever', 'cough', 'rash']):
    frame = pd.DataFrame({'ward': ['A'] * 3, 'note': notes})
    pyreadstat.write_xport(frame, 'visits.xpt', file_format_version=5)
    by_pandas = pd.read_sas('visits.xpt', format='xport')
    by_pyreadstat, _ = pyreadstat.read_xport('visits.xpt')
    print('rows written 3, pandas', len(by_pandas), 'pyreadstat', len(by_pyreadstat), notes)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

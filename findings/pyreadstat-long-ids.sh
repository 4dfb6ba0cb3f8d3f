#!/usr/bin/env bash
# pyreadstat writes different whole numbers of 17 digits to SPSS, Stata and SAS files as one number.
#
# Packages: pyreadstat 1.3.7, pandas 3.1.1, numpy 2.4.6.
# Behaviour: these formats hold numbers as doubles, whose whole numbers end at 2^53 (16 digits). An
#   int64 column is converted without an error or a warning, so people whose ids differ only in the
#   last digit become one person. pandas.DataFrame.to_stata warns of a loss of precision here.
# Expected: an error for a whole number that its double does not hold.
# Instead: write ids as texts, and compare the count of different ids before and after.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyreadstat==1.3.7' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
written: 3 different ids
write_sav, read_sav: 1
write_dta, read_dta: 1
write_xport, read_xport: 1
write_por, read_por: 1
ids as texts, write_sav, read_sav: 3
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import pandas as pd
import pyreadstat

table = pd.DataFrame({'ID': [90071992547409931, 90071992547409932, 90071992547409933]})
print('written:', table.ID.nunique(), 'different ids')
for kind in ('sav', 'dta', 'xport', 'por'):
    getattr(pyreadstat, f'write_{kind}')(table, 'table.file')
    back, _ = getattr(pyreadstat, f'read_{kind}')('table.file')
    print(f'write_{kind}, read_{kind}:', back.iloc[:, 0].nunique())
pyreadstat.write_sav(table.astype(str), 'table.sav')
print('ids as texts, write_sav, read_sav:', pyreadstat.read_sav('table.sav')[0].ID.nunique())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

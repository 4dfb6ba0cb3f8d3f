#!/usr/bin/env bash
# anonymity-api counts each value once for each row that has it, so its t grows with the table.
#
# Packages: anonymity-api 1.0.4, pandas 1.5.3, numpy 1.26.4.
# Behaviour: t-closeness is the largest distance between the distribution of a sensitive value in a
#   group and in the table; it lies between 0 and 1 and does not depend on the number of rows. The
#   function sums over the column of the table, not over its different values: a common value counts
#   often. Numbers are also taken in the order of the rows, not of their size.
# Expected: 0.25 for the diagnoses and for the ages below, however often the table is repeated.
# Why it matters here: the number says whether a table may leave.
# Instead: pycanon's t_closeness, or the sum over different values.
# Source: Li, Li and Venkatasubramanian, t-Closeness (2007): variational and ordered distance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'anonymity-api==1.0.4' 'pandas==1.5.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
8 rows, diagnosis: anonymity-api 1.00, by the definition 0.25
8 rows, age: anonymity-api 0.36, by the definition 0.25
40 rows, diagnosis: anonymity-api 5.00, by the definition 0.25
40 rows, age: anonymity-api 0.32, by the definition 0.25
200 rows, diagnosis: anonymity-api 25.00, by the definition 0.25
200 rows, age: anonymity-api 0.31, by the definition 0.25
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from anonymity_api.verify import t_closeness


def distance(table, column, ordered):
    values = sorted(table[column].unique())
    share = lambda rows: np.array([(rows[column] == value).mean() for value in values])
    gaps = [share(group) - share(table) for _, group in table.groupby('area')]
    if ordered:
        return max(abs(gap.cumsum()).sum() / (len(values) - 1) for gap in gaps)
    return max(abs(gap).sum() / 2 for gap in gaps)


table = pd.DataFrame({
    'area': ['north'] * 4 + ['south'] * 4,
    'diagnosis': ['flu'] * 4 + ['flu', 'flu', 'asthma', 'asthma'],
    'age': [60, 40, 40, 40, 40, 60, 60, 60],
})
for copies in (1, 5, 25):
    rows = pd.concat([table] * copies, ignore_index=True)
    for column, ordered in (('diagnosis', False), ('age', True)):
        print(f'{len(rows)} rows, {column}: anonymity-api {t_closeness(rows, ["area"], [column]):.2f},',
              f'by the definition {distance(rows, column, ordered):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

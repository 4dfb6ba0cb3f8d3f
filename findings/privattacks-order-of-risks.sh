#!/usr/bin/env bash
# privattacks gives the risks of people in another order than the table has, and writes -1 into the table.
#
# Packages: privattacks 1.4, pandas 2.2.3, numpy 2.2.6, pyreadr 0.5.3, tqdm 4.67.1.
# Behaviour: with distribution=True the posterior vulnerability comes for each record, sorted by the
#   quasi-identifiers in the order of their first appearance, not by the rows. Stored as a column, the
#   risk of the only person of 91 is given to others. Data also replaces the missing values of the
#   table that it is given by -1, in place.
# Expected: one number for each row, in the order of the rows, or an index; and an unchanged table.
# Why it matters here: the people whose risk is high are removed by it, and others stay.
# Instead: 1 by the size of each group, table.groupby(columns)[columns[0]].transform('size'), and a
#   copy of the table.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.6' 'pyreadr==0.5.3' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'privattacks==1.4'
cat > expected.txt <<'EXPECTED'
mean: privattacks 0.67, by the groups 0.67
age 30, north: privattacks 0.50, by the groups 0.50
age 91, south: privattacks 0.50, by the groups 1.00
age 30, south: privattacks 1.00, by the groups 1.00
age 40, north: privattacks 1.00, by the groups 0.50
age 30, north: privattacks 0.50, by the groups 0.50
age 40, north: privattacks 0.50, by the groups 0.50
weights of the table afterwards: [70.0, -1.0, 64.0, 88.0, 71.0, -1.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
import privattacks

table = pd.DataFrame({
    'age': [30, 91, 30, 40, 30, 40],
    'area': ['north', 'south', 'south', 'north', 'north', 'north'],
    'weight': [70.0, np.nan, 64.0, 88.0, 71.0, np.nan],
})
groups = ['age', 'area']
table['risk'] = 1 / table.groupby(groups)['age'].transform('size')
data = privattacks.Data(dataframe=table)
mean, risks = privattacks.Attack(data).posterior_vulnerability('reid', groups, distribution=True)
print(f'mean: privattacks {mean:.2f}, by the groups {table["risk"].mean():.2f}')
for row, seen in zip(table.itertuples(), risks):
    print(f'age {row.age}, {row.area}: privattacks {seen:.2f}, by the groups {row.risk:.2f}')
print('weights of the table afterwards:', table['weight'].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# smartnoise-sql answers COUNT(*) and SUM from one row of each person, and charges ε for each
# column.
#
# Packages: smartnoise-sql 1.0.10, opendp 0.14.2, sqlalchemy 2.1.9, pandas 2.3.3, numpy 2.4.6.
# Behaviour: max_ids is 1 by default: one random row of each person is kept before the query. With
#   four rows a person, the count and the sum are a quarter of the table's, however large ε is; the
#   result has no mark of it. The ε of Privacy is spent once for each noisy column that a query
#   needs, a hidden count of persons among them: COUNT(*) costs it twice, AVG three times.
# Expected: totals near the table's at a large ε, or a warning; a query costs the ε that was given.
# Instead: max_ids in the metadata of the table; ask get_privacy_cost before each query.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'smartnoise-sql==1.0.10' 'opendp==0.14.2' 'sqlalchemy==2.1.9' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
table: 2000 rows, sum 300000
default COUNT(*): about 500, epsilon 200
default SUM(cost): about 75000, epsilon 200
default AVG(cost): about 150, epsilon 300
{'max_ids': 4} COUNT(*): about 2000, epsilon 200
{'max_ids': 4} SUM(cost): about 300000, epsilon 200
{'max_ids': 4} AVG(cost): about 150, epsilon 300
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from snsql import Privacy, from_df

random = np.random.default_rng(0)
visits = pd.DataFrame({'patient': np.repeat(np.arange(500), 4), 'cost': random.uniform(0, 300, 2000)})
columns = {
    'patient': {'type': 'int', 'private_id': True},
    'cost': {'type': 'float', 'lower': 0.0, 'upper': 300.0},
}
print('table:', len(visits), 'rows, sum', 25000 * round(visits['cost'].sum() / 25000))
for settings in ({}, {'max_ids': 4}):
    metadata = {'': {'': {'visits': {'rows': 2000, **settings, **columns}}}}
    reader = from_df(visits, metadata=metadata, privacy=Privacy(epsilon=100.0, delta=1e-6))
    for query in ('COUNT(*)', 'SUM(cost)', 'AVG(cost)'):
        text = f'SELECT {query} AS answer FROM visits'
        answer, cost = reader.execute(text)[1][0], reader.get_privacy_cost(text)[0]
        step = {'COUNT(*)': 100, 'SUM(cost)': 25000, 'AVG(cost)': 50}[query]
        answer = step * round(float(answer) / step)
        print(settings or 'default', f'{query}: about {answer}, epsilon {cost:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

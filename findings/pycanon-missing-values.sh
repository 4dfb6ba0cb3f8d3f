#!/usr/bin/env bash
# pycanon leaves a person with a missing quasi-identifier out when it measures k-anonymity.
#
# Packages: pycanon 1.0.1.post2, pandas 3.1.1, numpy 2.4.6.
# Behaviour: the equivalence classes come from a pandas groupby, which drops the rows whose key
#   holds a missing value. Somebody who is alone in a region, and whose age is missing, counts for
#   nothing: k and l stay 5, though the region names one person.
# Expected: k is 1, as it is where the same person has an age; or an error.
# Instead: fill missing quasi-identifiers with a value of their own before any of its measures.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pycanon==1.0.1.post2' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
one more person, age 40-49: k 1, l 1; smallest group 1
one more person, age missing: k 5, l 5; smallest group 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pycanon.anonymity import k_anonymity, l_diversity


def show(name, table):
    smallest = table.fillna('none').value_counts(['age', 'region']).min()
    k = k_anonymity(table, ['age', 'region'])
    distinct = l_diversity(table, ['age', 'region'], ['diagnosis'])
    print(f'{name}: k {k}, l {distinct}; smallest group {smallest}')


group = {'age': ['30-39'] * 5, 'region': ['north'] * 5, 'diagnosis': ['a', 'b', 'c', 'd', 'e']}
group = pd.DataFrame(group)
for name, age in (('age 40-49', '40-49'), ('age missing', None)):
    person = pd.DataFrame({'age': [age], 'region': ['south'], 'diagnosis': ['f']})
    show(f'one more person, {name}', pd.concat([group, person], ignore_index=True))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

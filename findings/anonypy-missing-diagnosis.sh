#!/usr/bin/env bash
# anonypy returns groups smaller than k where a sensitive value is missing.
#
# Packages: anonypy 0.2.1, pandas 2.3.3, numpy 2.2.6.
# Behaviour: anonymize_k_anonymity counts all rows when it splits the people into groups of at least
#   k, and lists, for each group, the sensitive values with their counts. A missing value has no
#   count. Its person is silently left out, and the published group has fewer than k members.
# Expected: a row for "missing", or groups of at least k members among those published.
# Instead: give missing sensitive values a category of their own before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'anonypy==0.2.1' 'pandas==2.3.3' 'numpy==2.2.6'
cat > expected.txt <<'EXPECTED'
complete - people in each group: {'20-24': 3, '50-52': 3}
one diagnosis missing - people in each group: {'20-24': 2, '50-52': 3}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import anonypy
import pandas as pd

for missing in (False, True):
    table = pd.DataFrame({
        'age': [20, 22, 24, 50, 51, 52],
        'sex': ['f', 'm', 'f', 'm', 'f', 'm'],
        'diagnosis': ['a', 'b', None if missing else 'c', 'd', 'a', 'b'],
    })
    for name in ('sex', 'diagnosis'):
        table[name] = table[name].astype('category')
    preserver = anonypy.Preserver(table, ['age', 'sex'], 'diagnosis')
    rows = pd.DataFrame(preserver.anonymize_k_anonymity(k=3))
    rows['age'] = [' '.join(age) for age in rows['age']]
    groups = rows.groupby('age')['count'].sum().to_dict()
    print('one diagnosis missing' if missing else 'complete', '- people in each group:', groups)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

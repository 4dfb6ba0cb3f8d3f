#!/usr/bin/env bash
# stable-hash-splitter moves people between training and test as soon as one row of the table has no number.
#
# Packages: stable-hash-splitter 0.1.1, scikit-learn 1.9.1, scipy 1.17.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: StableHashSplit hashes str(identifier). A column of whole numbers in which one is missing is read by
#   pandas as floats, and so is a table that becomes an array of floats: "1000" is then "1000.0", which has
#   another hash. People who were in the test set are in the training data of the next version of the file, and the
#   reverse, without a message.
# Expected: "This ensures that any data sample is permanently assigned to either the training or test set based
#   on a hash of its identifier. This prevents data leakage when datasets are updated"; the number 1000
#   is the same identifier.
# Instead: read the column as text, dtype={'id': str}.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'stable-hash-splitter==0.1.1' \
  'scikit-learn==1.9.1' 'scipy==1.17.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
first file: int64, 188 people in the test set
with one more person: int64, of the test set 0 are now in training; of the training data 0 in test
with one row without a number: float64, of the test set 143 are now in training; of the training data 188 in test
first file as an array of floats: 143 are now in training, 188 in test
read as text: 0 are now in training, 0 in test
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io

import pandas as pd
from stable_hash_splitter import StableHashSplit


def find_test(table, ids, column='id'):
    train, test = next(StableHashSplit(0.2, column).split(table))
    return {int(float(ids[i])) for i in test if pd.notna(ids[i])}


lines = 'id,age\n' + ''.join(f'{number},50\n' for number in range(1000, 2000))
first = pd.read_csv(io.StringIO(lines))
before = find_test(first, first.id)
print(f'first file: {first.id.dtype}, {len(before)} people in the test set')
for name, text in (('with one more person', '2000,60\n'), ('with one row without a number', ',60\n')):
    table = pd.read_csv(io.StringIO(lines + text))
    after = find_test(table, table.id)
    print(f'{name}: {table.id.dtype}, of the test set {len(before - after)} are now in training;',
          f'of the training data {len(after - before - {2000})} in test')
rows = first.to_numpy(dtype=float)
after = find_test(rows, rows[:, 0], 0)
print(f'first file as an array of floats: {len(before - after)} are now in training, {len(after - before)} in test')
text = pd.read_csv(io.StringIO(lines + ',60\n'), dtype={'id': str})
after = find_test(text, text.id)
print(f'read as text: {len(before - after)} are now in training, {len(after - before)} in test')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

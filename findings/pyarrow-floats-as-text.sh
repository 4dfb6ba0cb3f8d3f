#!/usr/bin/env bash
# pyarrow writes a float from 1e10 on in scientific notation where it is cast to text.
#
# Packages: pyarrow 26.0.1, pandas 3.0.0.
# Behaviour: 9999999999.0 becomes "9999999999", and 10000000000.0 becomes "1e+10". pandas stores
#   a column of integers with one missing value as floats, so one missing code changes the text of
#   each code of eleven digits in the other rows.
# Expected: whole numbers up to 2^53 as digits, whatever another row holds.
# Instead: cast to int64 first where all values are whole, or store such codes as texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyarrow==26.0.1' 'pandas==3.0.0'
cat > expected.txt <<'EXPECTED'
9999999999.0 -> 9999999999
10000000000.0 -> 1e+10
codes: 12345678901 4711
one code missing: 1.2345678901e+10 4711
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import pandas
import pyarrow


def texts(values):
    return pyarrow.array(values).cast(pyarrow.string()).drop_null().to_pylist()


for value in (9999999999.0, 10000000000.0):
    print(value, '->', *texts([value]))
print('codes:', *texts(pandas.Series([12345678901, 4711])))
print('one code missing:', *texts(pandas.Series([12345678901, 4711, None])))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# simplefix writes small prices in scientific notation, which FIX does not have.
#
# Packages: simplefix 1.0.17.
# Behaviour: append_pair writes a float with Python's str. A price of 0.00001 becomes 1e-05, 0.1 + 0.2
#   becomes 0.30000000000000004, and True becomes True. FIX has digits, an optional point and sign
#   for numbers, no exponent and at most 15 significant digits, and Y or N for a flag. A reader that
#   stops at the letter books a price of 1. No error, no warning.
# Expected: 0.00001, 0.3 and Y, or an error for a float.
# Instead: pass texts, for example f'{price:.5f}' or of a decimal.Decimal with 'f'.
# Source: FIX 4.4, volume 1, "FIX data types".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'simplefix==1.0.17'
cat > expected.txt <<'EXPECTED'
price 44=1e-05
price 44=0.30000000000000004
flag 43=True
text 44=0.00001
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import simplefix

for name, tag, value in (
    ('price', 44, 0.00001), ('price', 44, 0.1 + 0.2), ('flag', 43, True), ('text', 44, '0.00001')
):
    message = simplefix.FixMessage()
    message.append_pair(tag, value)
    print(name, message.encode(raw=True).rstrip(b'\x01').decode())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

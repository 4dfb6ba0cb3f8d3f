#!/usr/bin/env bash
# cobolio takes no room for a printed point, comma or sign, so that all later fields move.
#
# Packages: cobolio 0.1.5.
# Behaviour: in an edited picture such as ZZ9.99 the point is a character of the field, which takes six
#   bytes; the V of 999V99 takes none. cobolio counts the Z, 9, A and X only: the field has five bytes,
#   its last digit is lost, and each field behind it begins a byte too early for each such character.
# Expected: 12.50 and A12; as many bytes as the record has.
# Instead: replace the edited picture by X with the full length.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cobolio==0.1.5'
cat > expected.txt <<'EXPECTED'
999V99: 12 of 12 bytes, amount '01250', ward 'A12'
ZZ9.99: 12 of 13 bytes, amount ' 12.5', ward '0A1'
Z,ZZ9.99: 13 of 15 bytes, amount '   12.', ward '50A'
-ZZ9.99: 12 of 14 bytes, amount '- 12.', ward '50A'
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import cobolio

amounts = {'999V99': '01250', 'ZZ9.99': ' 12.50', 'Z,ZZ9.99': '   12.50', '-ZZ9.99': '- 12.50'}
for picture, printed in amounts.items():
    book = f"""
       01  BILL.
           05  NAME        PIC X(4).
           05  AMOUNT      PIC {picture}.
           05  WARD        PIC X(3).
"""
    with contextlib.redirect_stdout(io.StringIO()):
        length, layout = cobolio.copybook_to_layout(book)
    line = f'ANNA{printed}A12'
    seen = cobolio.loads(line.encode('cp037'), layout)
    print(f"{picture}: {length} of {len(line)} bytes, amount {seen['AMOUNT']!r}, ward {seen['WARD']!r}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

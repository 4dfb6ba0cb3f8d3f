#!/usr/bin/env bash
# coboljsonifier reads V9(10) as no decimals: it keeps the last digit of a number of decimals.
#
# Packages: coboljsonifier 1.0.8.
# Behaviour: for a signed number whose decimals are written with a count, S9(3)V9(10), the pattern keeps
#   the last digit of the count. Ten decimals become 0, twelve 2, and the field is shorter by as many
#   digits, so that the sign is looked for in the middle of it and the fields behind it move. Up to nine
#   decimals the count is right.
# Expected: 13 digits, seven bytes packed, with 10 decimals.
# Instead: write the nines out: S9(3)V9999999999.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'coboljsonifier==1.0.8'
cat > expected.txt <<'EXPECTED'
S9(3)V9(9): 7 bytes in place of 7, 9 decimals
S9(3)V9(10): 2 bytes in place of 7, 0 decimals
S9(3)V9(12): 3 bytes in place of 8, 2 decimals
S9(3)V9999999999 {'FACTOR': Decimal('0.0000098765'), 'UNIT': 'EUR'}
S9(3)V9(10) FACTOR - Invalid data! Expected field signal: 12[C], 13[D], or 15[F]. Received 0 - b'\x00\x00'...
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

from coboljsonifier.config.parser_type_enum import ParseType
from coboljsonifier.copybookextractor import CopybookExtractor
from coboljsonifier.parser import Parser


def build(picture):
    pathlib.Path('book.cob').write_text(f"""       01  RATE.
           05  FACTOR      PIC {picture} COMP-3.
           05  UNIT        PIC X(3).
""")
    return Parser(CopybookExtractor('book.cob').dict_book_structure, ParseType.BINARY_EBCDIC).build()


for picture, digits in (('S9(3)V9(9)', 12), ('S9(3)V9(10)', 13), ('S9(3)V9(12)', 15)):
    factor, unit = build(picture)._children
    print(f'{picture}: {factor.size} bytes in place of {digits // 2 + 1}, {factor.decimals} decimals')
record = bytes.fromhex('0000000098765C') + 'EUR'.encode('cp037')
for picture in ('S9(3)V9999999999', 'S9(3)V9(10)'):
    parser = build(picture)
    try:
        parser.parse(record)
        print(picture, parser.value)
    except ValueError as error:
        print(picture, error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

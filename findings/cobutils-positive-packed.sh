#!/usr/bin/env bash
# cobutils reads each positive packed number as a negative one.
#
# Packages: cobutils 0.2.8, coboljsonifier 1.0.8 (reads the same records, for comparison).
# Behaviour: the last half byte of a packed number (COMP-3) is its sign: hexadecimal C for plus, D for
#   minus and F for a field without a sign. cobutils takes everything but F for minus, so that a signed
#   field, to which COBOL writes C, has the wrong sign: all amounts above 0 become debts. cobutils
#   writes F itself, so a file that it wrote comes back right.
# Expected: 1250.00, -80.50 and 300.00, as coboljsonifier reads them.
# Instead: change C to F in the last half byte before reading, or another reader.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cobutils==0.2.8' 'coboljsonifier==1.0.8'
cat > expected.txt <<'EXPECTED'
0125000C: cobutils -1250.00, coboljsonifier 1250.00
0008050D: cobutils -80.50, coboljsonifier -80.50
0030000C: cobutils -300.00, coboljsonifier 300.00
sum: cobutils -1630.50, coboljsonifier 1469.50
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

import cobutils
from coboljsonifier.config.parser_type_enum import ParseType
from coboljsonifier.copybookextractor import CopybookExtractor
from coboljsonifier.parser import Parser

book = """       01  PAYMENT.
           05  AMOUNT      PIC S9(5)V99 COMP-3.
"""
pathlib.Path('book.cob').write_text(book)
mine = cobutils.load_definition_from_text(book)
other = Parser(CopybookExtractor('book.cob').dict_book_structure, ParseType.BINARY_EBCDIC).build()
total, right = 0, 0
for data in ('0125000C', '0008050D', '0030000C'):
    record = bytes.fromhex(data)
    other.parse(record)
    amount = cobutils.Record(mine, record)['amount']
    total, right = total + amount, right + other.value['AMOUNT']
    print(f'{data}: cobutils {amount}, coboljsonifier {other.value["AMOUNT"]}')
print(f'sum: cobutils {total}, coboljsonifier {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

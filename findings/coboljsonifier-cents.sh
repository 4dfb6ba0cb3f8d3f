#!/usr/bin/env bash
# coboljsonifier loses cents of a large amount, since it divides floating point numbers.
#
# Packages: coboljsonifier 1.0.8.
# Behaviour: COBOL has exact numbers of up to 18 digits, and coboljsonifier returns a Decimal "to handle
#   monetary values". It makes this Decimal of a quotient of floats, which have 15 to 17 digits: an
#   amount of 18 digits is some cents off, packed, binary or in text.
# Expected: 1234567890123456.78, as the bytes have it.
# Instead: Decimal(value).scaleb(-decimals) of a field that is declared without decimals.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'coboljsonifier==1.0.8'
cat > expected.txt <<'EXPECTED'
1250.00: packed 1250.00, binary 1250.00
1234567890123456.78: packed 1234567890123456.75, binary 1234567890123456.75
9000000000000000.01: packed 9000000000000000.00, binary 9000000000000000.00
9876543210987654.99: packed 9876543210987654.00, binary 9876543210987654.00
of 1000 amounts from 1000000000000000.00 on 920 are wrong
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib
from decimal import Decimal

from coboljsonifier.config.parser_type_enum import ParseType
from coboljsonifier.copybookextractor import CopybookExtractor
from coboljsonifier.parser import Parser

pathlib.Path('book.cob').write_text("""       01  BALANCE.
           05  PACKED      PIC S9(16)V99 COMP-3.
           05  BINARY-ONE  PIC S9(16)V99 COMP.
""")
parser = Parser(CopybookExtractor('book.cob').dict_book_structure, ParseType.BINARY_EBCDIC).build()
wrong = 0
for cents in (125000, 123456789012345678, 900000000000000001, 987654321098765499):
    parser.parse(bytes.fromhex(f'0{cents:018d}C') + cents.to_bytes(8, 'big', signed=True))
    packed, binary = parser.value.values()
    print(f'{Decimal(cents).scaleb(-2)}: packed {packed}, binary {binary}')
for cents in range(10**17, 10**17 + 1000):
    parser.parse(bytes.fromhex(f'0{cents:018d}C') + cents.to_bytes(8, 'big', signed=True))
    wrong += parser.value['PACKED'] != Decimal(cents).scaleb(-2)
print(f'of 1000 amounts from {Decimal(10**17).scaleb(-2)} on {wrong} are wrong')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

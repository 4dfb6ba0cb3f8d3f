#!/usr/bin/env bash
# ebcdic_parser reads positive numbers with a sign as negative ones.
#
# Packages: ebcdic-parser 3.4.0, cobolio 0.1.5 (reads the same fields, for comparison).
# Behaviour: a signed number in text, PIC S9(5), has its sign in the first half of its last byte:
#   hexadecimal C for plus, D for minus; F stands for a number without a sign. ebcdic_parser takes
#   everything but F for minus: 0012C, which is +123, becomes -123. Packed numbers are read right.
# Expected: 1.23 and -1.23, as cobolio reads them.
# Instead: cobolio for signed zoned fields, or another reader.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ebcdic-parser==3.4.0' 'cobolio==0.1.5'
cat > expected.txt <<'EXPECTED'
f0f0f1f2c300123c: zoned -1.23, packed 1.23; cobolio {'AMOUNT': '+001.23', 'CHARGE': '+001.23'}
f0f0f1f2d300123d: zoned -1.23, packed -1.23; cobolio {'AMOUNT': '-001.23', 'CHARGE': '-001.23'}
f0f0f1f2f300123f: zoned 1.23, packed 1.23; cobolio {'AMOUNT': '+001.23', 'CHARGE': '+001.23'}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import json
import os
import sys

import cobolio
from ebcdic_parser.convert import run

book = """
       01  PAYMENT.
           05  AMOUNT      PIC S9(3)V99.
           05  CHARGE      PIC S9(3)V99 COMP-3.
"""
with contextlib.redirect_stdout(io.StringIO()):
    length, layout = cobolio.copybook_to_layout(book)
fields = [
    {'name': 'amount', 'type': 'zonedDecimal', 'size': 5, 'scale': 2},
    {'name': 'charge', 'type': 'packedDecimal', 'size': 3, 'scale': 2},
]
with open('layout.json', 'w') as file:
    json.dump({'description': 'payments', 'layouts': [{'layouttype': '1', 'layout': fields}]}, file)
records = [
    text.encode('cp037') + bytes.fromhex(packed)
    for text, packed in (('0012C', '00123C'), ('0012L', '00123D'), ('00123', '00123F'))
]
with open('payments.dat', 'wb') as file:
    file.write(b''.join(records))
os.mkdir('out')
screen = sys.stdout
run('payments.dat', 'out', 'layout.json', logfolder=os.getcwd(), verbose=False, outputDelimiter=',')
sys.stdout = screen
with open('out/payments_type_1.txt') as file:
    for record, line in zip(records, file):
        amount, charge, _ = line.split(',')
        print(f'{record.hex()}: zoned {amount}, packed {charge}; cobolio {cobolio.loads(record, layout)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

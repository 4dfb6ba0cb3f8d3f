#!/usr/bin/env bash
# cobutils joins the halves of a binary number of twelve digits wrong, and writes four of its six bytes.
#
# Packages: cobutils 0.2.8.
# Behaviour: cobutils has six bytes for a binary number (COMP) from twelve digits on. It reads them as
#   two and four bytes, and moves the first two up by 16 bits where 32 are needed: what is above
#   2**31 is another number. It writes four bytes, so that each later field of the record moves.
# Expected: 5000000000 for the six bytes of 5000000000, and a record of 10 bytes after 10 were read.
# Instead: int.from_bytes of the six bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cobutils==0.2.8'
cat > expected.txt <<'EXPECTED'
70000: read 70000, ward A127
3000000000: read -1294967296, ward A127
5000000000: read 705032704, ward A127
-5000000000: read -127488, ward A127
70000 read and written: 10 bytes are 8, read again 292634929, ward '27  '
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import cobutils

book = """       01  INVOICE.
           05  AMOUNT      PIC S9(12) COMP.
           05  WARD        PIC X(4).
"""
definition = cobutils.load_definition_from_text(book)
for amount in (70000, 3000000000, 5000000000, -5000000000):
    data = amount.to_bytes(6, 'big', signed=True) + b'A127'
    record = cobutils.Record(definition, data)
    print(f'{amount}: read {record["amount"]}, ward {record["ward"].decode()}')
record = cobutils.Record(definition, (70000).to_bytes(6, 'big') + b'A127')
written = record.get_bytes()
again = cobutils.Record(definition, written + b'  ')
print(f'70000 read and written: {definition.size()} bytes are {len(written)},',
      f'read again {again["amount"]}, ward {again["ward"].decode()!r}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

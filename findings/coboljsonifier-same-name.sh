#!/usr/bin/env bash
# coboljsonifier drops a field whose name another group has too, and reads all later ones too early.
#
# Packages: coboljsonifier 1.0.8, cobolio 0.1.5 (has the offsets of the same record, for comparison).
# Behaviour: in COBOL two groups may have fields of one name, NAME OF SENDER and NAME OF RECEIVER.
#   coboljsonifier leaves the groups out and puts the fields into a dictionary by their names, where the
#   second takes the place of the first: the record seems shorter, the sender is lost or is taken for the
#   receiver, and whatever comes later is read from the wrong place.
# Expected: both names and both cities, and EUR for the currency.
# Instead: give each field of the copybook its own name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'coboljsonifier==1.0.8' 'cobolio==0.1.5'
cat > expected.txt <<'EXPECTED'
cobolio, 27 bytes: NAME at 0: 'ANNA  '
cobolio, 27 bytes: CITY at 6: 'BERLIN'
cobolio, 27 bytes: NAME at 12: 'BEN   '
cobolio, 27 bytes: CITY at 18: 'PARIS '
cobolio, 27 bytes: CURRENCY at 24: 'EUR'
coboljsonifier, 15 bytes: {'NAME': 'ANNA', 'CITY': 'BERLIN', 'CURRENCY': 'BEN'}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import pathlib

import cobolio
from coboljsonifier.config.parser_type_enum import ParseType
from coboljsonifier.copybookextractor import CopybookExtractor
from coboljsonifier.parser import Parser

book = """       01  TRANSFER.
           05  SENDER.
               10  NAME    PIC X(6).
               10  CITY    PIC X(6).
           05  RECEIVER.
               10  NAME    PIC X(6).
               10  CITY    PIC X(6).
           05  CURRENCY    PIC X(3).
"""
pathlib.Path('book.cob').write_text(book)
with contextlib.redirect_stdout(io.StringIO()):
    length, layout = cobolio.copybook_to_layout(book)
line = 'ANNA  BERLINBEN   PARIS EUR'
for name, start, size, *_ in layout:
    print(f'cobolio, {length} bytes: {name} at {start}: {line[start : start + size]!r}')
parser = Parser(CopybookExtractor('book.cob').dict_book_structure, ParseType.FLAT_ASCII).build()
parser.parse(line)
print(f'coboljsonifier, {parser.size} bytes: {parser.value}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# coboljsonifier gives a record the values of the record before, from its first blank number on.
#
# Packages: coboljsonifier 1.0.8.
# Behaviour: the parser keeps the values of the last record. Where a number in text (FLAT_ASCII) is
#   blank, the rest of the line is dropped with it, and each field from there on keeps its value: the
#   next person has the weight, the name and the ward of the person before.
# Expected: a missing weight, with the name and the ward of the record.
# Instead: build a new parser for each record, where the fields after a blank number are then None.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'coboljsonifier==1.0.8'
cat > expected.txt <<'EXPECTED'
'0001070ANNA  A12' {'NUM': 1, 'WEIGHT': 70, 'NAME': 'ANNA', 'WARD': 'A12'}
'0002   BEN   B07' {'NUM': 2, 'WEIGHT': 70, 'NAME': 'ANNA', 'WARD': 'A12'}
'0003081CARL  C01' {'NUM': 3, 'WEIGHT': 81, 'NAME': 'CARL', 'WARD': 'C01'}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

from coboljsonifier.config.parser_type_enum import ParseType
from coboljsonifier.copybookextractor import CopybookExtractor
from coboljsonifier.parser import Parser

pathlib.Path('book.cob').write_text("""       01  PATIENT.
           05  NUM         PIC 9(4).
           05  WEIGHT      PIC 9(3).
           05  NAME        PIC X(6).
           05  WARD        PIC X(3).
""")
parser = Parser(CopybookExtractor('book.cob').dict_book_structure, ParseType.FLAT_ASCII).build()
for line in ('0001070ANNA  A12', '0002   BEN   B07', '0003081CARL  C01'):
    parser.parse(line)
    print(repr(line), parser.value)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# cobutils reads a number that it does not understand as 0, negative ones of GnuCOBOL among them.
#
# Packages: cobutils 0.2.8.
# Behaviour: a number in text, PIC S9(5), has its sign in the last character. GnuCOBOL and Micro Focus
#   write p to y for -0 to -9 in ASCII; the mainframe has } and J to R. cobutils knows the second, and a
#   field with any other character, a blank or a letter too, is 0 without an error or a warning.
# Expected: -12, or an error, where the field is 0001r; an error for a field with letters in it.
# Instead: set cobutils.parser.IGNORE_PARSER_ERROR to False, which makes an error of each of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cobutils==0.2.8'
cat > expected.txt <<'EXPECTED'
ANNA '00012' (plus 12): 12
BEN  '0001K' (minus 12, as a mainframe writes it): -12
CARL '0001r' (minus 12, as GnuCOBOL writes it): 0
DORA '   12' (right-justified): 0
EMIL '12.50' (with a point): 0
FAY  'UNKN.' (a note): 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import cobutils

book = """       01  ACCOUNT.
           05  OWNER       PIC X(4).
           05  BALANCE     PIC S9(5).
"""
definition = cobutils.load_definition_from_text(book)
meaning = {
    'ANNA00012': 'plus 12',
    'BEN 0001K': 'minus 12, as a mainframe writes it',
    'CARL0001r': 'minus 12, as GnuCOBOL writes it',
    'DORA   12': 'right-justified',
    'EMIL12.50': 'with a point',
    'FAY UNKN.': 'a note',
}
for line, what in meaning.items():
    record = cobutils.Record(definition, line.encode('ascii'))
    print(f"{record['owner'].decode()} {line[4:]!r} ({what}): {record['balance']}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# cobolio begins the field after a REDEFINES at the end of the redefinition, however short it is.
#
# Packages: cobolio 0.1.5.
# Behaviour: a field that redefines another one gives it a second name and takes no room of its own. Where
#   it is shorter, as a year that redefines a date of eight digits, cobolio continues after the year: the
#   next fields begin in the middle of the date, and the record is four bytes shorter than it is.
# Expected: A12 for the ward, and 70 for the weight, whether the year is named or not.
# Instead: fill each redefinition up with a FILLER to the length of what it redefines.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cobolio==0.1.5'
cat > expected.txt <<'EXPECTED'
without the year: 14 bytes, ward A12, weight 070
with the year: 10 bytes, ward 030, weight 1A1
with a group of full length: 14 bytes, ward A12, weight 070
with a group for the year: 10 bytes, ward 030, weight 1A1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import cobolio

lines = {
    'without the year': '',
    'with the year': '           05  YEAR-OF REDEFINES DATE-OF PIC X(4).\n',
    'with a group of full length': (
        '           05  PARTS REDEFINES DATE-OF.\n'
        '               10  YEAR-OF PIC X(4).\n'
        '               10  FILLER PIC X(4).\n'
    ),
    'with a group for the year': (
        '           05  PARTS REDEFINES DATE-OF.\n'
        '               10  YEAR-OF PIC X(4).\n'
    ),
}
for name, line in lines.items():
    book = f"""
       01  VISIT.
           05  DATE-OF     PIC X(8).
{line}           05  WARD        PIC X(3).
           05  WEIGHT      PIC 9(3).
"""
    with contextlib.redirect_stdout(io.StringIO()):
        length, layout = cobolio.copybook_to_layout(book)
    seen = cobolio.loads('20260301A12070'.encode('cp037'), layout)
    print(f"{name}: {length} bytes, ward {seen['WARD']}, weight {seen['WEIGHT']}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# gnumeric returns the result that a formula had before the cells that it uses were changed.
#
# Packages: gnumeric 0.1.0, lark 1.3.1, lxml 6.1.3, python-dateutil 2.9.0.post0.
# Behaviour: the result of a formula is remembered when it is asked for, and computed again only if the
#   formula itself is set anew. A price that is changed leaves the sum as it was; the same workbook, saved
#   and loaded, has the right sum. A formula that was not yet asked for is right, so that two formulas of
#   one sheet contradict each other.
# Expected: 20 for A1*2 where A1 is 10.
# Instead: set the formulas again after a change, or ask for no result before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'gnumeric==0.1.0' 'lark==1.3.1' 'lxml==6.1.3' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
new: A1 2, A1*2 4, A1*3 not asked
A1 changed to 10: A1 10, A1*2 4, A1*3 30
saved and loaded: A1 10, A1*2 20, A1*3 30
A1 changed to 25: A1 25, A1*2 20, A1*3 30
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import gnumeric
from gnumeric.workbook import Workbook


def show(when):
    print(f'{when}: A1 {price.result}, A1*2 {double.result}, A1*3', triple.result if asked else 'not asked')


book = Workbook()
sheet = book.create_sheet('bill')
price, double, triple = (sheet.cell(0, column) for column in range(3))
price.set_value(2)
double.set_value('=A1*2')
asked = False
show('new')
price.set_value(10)
triple.set_value('=A1*3')
asked = True
show('A1 changed to 10')
book.save('bill.gnumeric')
sheet = gnumeric.load_workbook('bill.gnumeric').get_sheet_by_name('bill')
price, double, triple = (sheet.cell(0, column) for column in range(3))
show('saved and loaded')
price.set_value(25)
show('A1 changed to 25')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# quiffen removes commas from the amounts of a QIF file, so those with a decimal comma are wrong by
# a power of ten.
#
# Packages: quiffen 4.0.1.
# Behaviour: QIF does not fix the decimal sign; programs write the one of their country. quiffen
#   removes every comma as a separator of thousands. A payment of 12,50 is read as 1250, and a
#   salary of 1.234,56 as 1.23456. Dates of the same file are read right with day_first=True, and
#   splits agree with their totals, so the file looks consistent.
# Expected: -12.50 and 1234.56, or an error, or an option as for dates.
# Instead: replace the signs before reading, and compare the sum with the balance. The OFX readers
#   ofxparse and ofxtools take a decimal comma.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'quiffen==4.0.1'
cat > expected.txt <<'EXPECTED'
decimal point, 2024-12-31 Bakery -12.50, 2024-12-30 Salary 1234.56
decimal comma, 2024-12-31 Bakery -1250, 2024-12-30 Salary 1.23456
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from pathlib import Path

from quiffen import Qif

for name, bakery, salary in (('decimal point', '-12.50', '1,234.56'), ('decimal comma', '-12,50', '1.234,56')):
    path = Path(f'{name}.qif')
    path.write_text(
        f'!Type:Bank\nD31/12/2024\nT{bakery}\nPBakery\n^\nD30/12/2024\nT{salary}\nPSalary\n^\n'
    )
    for account in Qif.parse(path, day_first=True).accounts.values():
        for entries in account.transactions.values():
            print(name, *(f'{entry.date:%Y-%m-%d} {entry.payee} {entry.amount}' for entry in entries), sep=', ')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

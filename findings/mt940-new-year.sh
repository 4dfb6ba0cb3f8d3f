#!/usr/bin/env bash
# mt940 books payments around New Year a year too early or too late.
#
# Packages: mt940 0.8.1.
# Behaviour: the entry date of an MT940 line has a month and a day, and is near the value date,
#   which has a year. The year of the value date is taken. A payment with the value date 31 December
#   2025 and the entry 0102 has the booking date 2 January 2025, and one with 1 January 2026 and
#   1231 has 31 December 2026. Both lie outside the statement.
# Expected: the year that brings the entry date nearest to the value date.
# Instead: move booking by a year where it is more than half a year from date.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mt940==0.8.1'
cat > expected.txt <<'EXPECTED'
statement from 2025-12-30 to 2026-01-02
the same day: value date 2025-12-30, booking 2025-12-30, 0 days
booked in the new year: value date 2025-12-31, booking 2025-01-02, -363 days
booked in the old year: value date 2026-01-01, booking 2026-12-31, 364 days
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io

from mt940 import MT940

statement = ''':20:STATEMENT
:25:NL00BANK0123456789
:28C:1/1
:60F:C251230EUR1000,00
:61:2512301230D50,00NTRFNONREF
:86:the same day
:61:2512310102D100,00NTRFNONREF
:86:booked in the new year
:61:2601011231C20,00NTRFNONREF
:86:booked in the old year
:62F:C260102EUR870,00
'''
parsed = MT940(io.StringIO(statement)).statements[0]
print('statement from', parsed.start_balance.date, 'to', parsed.end_balance.date)
for payment in parsed.transactions:
    print(f'{payment.description}: value date {payment.date}, booking {payment.booking},',
          f'{(payment.booking - payment.date).days} days')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

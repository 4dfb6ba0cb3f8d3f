#!/usr/bin/env bash
# swiftlib loses the booking day and the currency of each payment where it converts a statement from MT940 to camt.053.
#
# Packages: swiftlib 1.0.1, lxml 6.0.2, pydantic 2.12.5.
# Behaviour: the line of a payment (field 61) has a value date and an entry date, the day on which it was booked. Both
#   are read, and the converter writes the value date as both. A payment of 30 November with a value date of 2
#   December is then booked on a day after the closing balance that contains it. The currency is "" for each payment,
#   though both balances state it; an empty currency is not allowed in camt.053.
# Expected: 2026-11-30 and EUR.
# Why it matters here: entries are sorted into months by their booking day.
# Instead: set booking_date and currency of each entry from the lines and the opening balance.
# Source: SWIFT MT940, field 61, subfields 1 (value date) and 2 (entry date); camt.053, BookgDt and ValDt.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'swiftlib==1.0.1' 'lxml==6.0.2' 'pydantic==2.12.5'
cat > expected.txt <<'EXPECTED'
OPBD 1000.00 EUR on 2026-11-27
CLBD 1060.00 EUR on 2026-11-30
100.00: booked 2026-11-30, value 2026-12-02; converted: booked 2026-12-02, value 2026-12-02, currency ''
40.00: booked 2026-11-30, value 2026-11-28; converted: booked 2026-11-28, value 2026-11-28, currency ''
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from swiftlib.converters.mt_to_iso import MT940ToCamt053Converter
from swiftlib.mt import parse

MESSAGE = """{1:F01BANKDEFFAXXX0000000000}{2:I940BANKDEFFXXXXN}{4:
:20:STMT1
:25:DE89370400440532013000
:28C:11/1
:60F:C261127EUR1000,00
:61:2612021130C100,00NTRFSALARY
:61:2611281130D40,00NTRFRENT
:62F:C261130EUR1060,00
-}"""
statement = parse(MESSAGE)
converted = MT940ToCamt053Converter().convert(statement).statements[0]
for balance in converted.balance:
    print(f'{balance.type_code} {balance.amount} {balance.currency} on {balance.date}')
for line, entry in zip(statement.statement_lines, converted.transactions):
    print(f'{line.amount}: booked {line.entry_date}, value {line.value_date}; converted: '
          f'booked {entry.booking_date}, value {entry.value_date}, currency {entry.currency!r}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# Two business days before 5 January 2026 is 24 December 2027 in bizdays: an offset that leaves a calendar
# at its beginning continues from its end.
#
# Packages: bizdays 1.0.19.
# Behaviour: offset and getdate take the business days of the calendar by their place in a list, and a
#   negative place counts from the end of a Python list. The calendar begins with its first holiday where
#   no start is given, so the first days of the first year are near. At the other end the same step
#   raises an IndexError, and all other methods check their dates.
# Expected: an error, as for dates that are given outside of the calendar.
# Why it matters here: a value date years after the payment makes an interest with the wrong sign.
# Instead: a startdate well before the first date, and a check that the result is before the date.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bizdays==1.0.19'
cat > expected.txt <<'EXPECTED'
from the first holiday to the last:
  1 business days before 2026-01-05: 2026-01-02
  2 business days before 2026-01-05: 2027-12-24
  5 business days before 2026-01-05: 2027-12-21
  first bizday before first day of January 2026: 2027-12-24
  first mon before first day of January 2026: 2026-01-05
from 2025 on:
  1 business days before 2026-01-05: 2026-01-02
  2 business days before 2026-01-05: 2025-12-31
  5 business days before 2026-01-05: 2025-12-26
  first bizday before first day of January 2026: 2025-12-31
  first mon before first day of January 2026: 2025-12-29
one business day after 2027-12-24: IndexError, list index out of range
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from bizdays import Calendar

HOLIDAYS = ['2026-01-01', '2026-12-25', '2027-01-01', '2027-12-25']
calendars = {
    'from the first holiday to the last': Calendar(HOLIDAYS, ['Saturday', 'Sunday']),
    'from 2025 on': Calendar(HOLIDAYS, ['Saturday', 'Sunday'], startdate='2025-01-01'),
}
for name, calendar in calendars.items():
    print(name + ':')
    for steps in (-1, -2, -5):
        print(f'  {-steps} business days before 2026-01-05: {calendar.offset("2026-01-05", steps)}')
    for rule in ('first bizday before first day', 'first mon before first day'):
        print(f'  {rule} of January 2026: {calendar.getdate(rule, 2026, 1)}')
calendar = calendars['from the first holiday to the last']
try:
    print('one business day after 2027-12-24:', calendar.offset('2027-12-24', 1))
except IndexError as error:
    print('one business day after 2027-12-24: IndexError,', error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

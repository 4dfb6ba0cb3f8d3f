#!/usr/bin/env bash
# bdateutil ignores the holidays where business days are subtracted or multiplied: a day before 29 December is 28 December, a
# holiday, and minus one day added gives 24 December.
#
# Packages: bdateutil 0.1, python-dateutil 2.9.0.post0, six 1.17.0.
# Behaviour: date - relativedelta(bdays=1, holidays=...) negates the relativedelta and adds it. The negated copy, and the
#   one that a multiplication makes, have no holidays.
# Expected: date - delta is date + (-delta), and delta * 1 is delta.
# Why it matters here: notice periods and settlement days count back from a date.
# Instead: add a negative number of business days.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-dateutil==2.9.0.post0' 'six==1.17.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'bdateutil==0.1'
cat > expected.txt <<'EXPECTED'
2026-12-29 less 1 business days: subtracted 2026-12-28, a business day False; minus 1 added 2026-12-24, a business day True
2026-12-29 less 2 business days: subtracted 2026-12-25, a business day False; minus 2 added 2026-12-23, a business day True
2026-12-29 less 3 business days: subtracted 2026-12-24, a business day True; minus 3 added 2026-12-22, a business day True
2026-12-24 and delta: 2026-12-29; and delta * 1: 2026-12-25; and -(-delta): 2026-12-25
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from bdateutil import isbday, relativedelta

HOLIDAYS = [date(2026, 12, 25), date(2026, 12, 28), date(2027, 1, 1)]
day = date(2026, 12, 29)
for number in (1, 2, 3):
    subtracted = day - relativedelta(bdays=number, holidays=HOLIDAYS)
    added = day + relativedelta(bdays=-number, holidays=HOLIDAYS)
    print(f'{day} less {number} business days: subtracted {subtracted}, a business day {isbday(subtracted, HOLIDAYS)}; '
          f'minus {number} added {added}, a business day {isbday(added, HOLIDAYS)}')
delta = relativedelta(bdays=1, holidays=HOLIDAYS)
start = date(2026, 12, 24)
print(f'{start} and delta: {start + delta}; and delta * 1: {start + delta * 1}; and -(-delta): {start + -(-delta)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The days of a monthly schedule of br-market-calendar stay short after a short month.
#
# Packages: br-market-calendar 0.2.3, python-dateutil 2.9.0.post0.
# Behaviour: generate_schedule adds the months to the date before, not to the start. From 30 January, where
#   end_of_month does not apply, the date in February is the 28th, and every later one is the 28th as well.
#   From the 29th, 30th or 31st the day of the month is lost for the rest of the schedule.
# Expected: 28 February, then 30 March and 30 April, the start with one, two and three months added.
# Instead: add multiples of the period to the start.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'br-market-calendar==0.2.3' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
monthly from 2025-01-28: 28.01. 28.02. 28.03. 28.04. 28.05. 28.06. ; by hand 28.01. 28.02. 28.03. 28.04. 28.05. 28.06.
monthly from 2025-01-30: 30.01. 28.02. 28.03. 28.04. 28.05. 28.06. 30.06. ; by hand 30.01. 28.02. 30.03. 30.04. 30.05. 30.06.
quarterly from 2025-08-31: 31.08. 30.11. 28.02. 28.05. 28.08. 28.11. 30.11. ; by hand 31.08. 30.11. 28.02. 31.05. 31.08. 30.11.
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import calendar
from datetime import date

from br_market_calendar.schedule import generate_schedule


def add(start, months):
    year, month = divmod(start.month - 1 + months, 12)
    last = calendar.monthrange(start.year + year, month + 1)[1]
    return date(start.year + year, month + 1, min(start.day, last))


for start, frequency, months in ((date(2025, 1, 28), 'monthly', 1), (date(2025, 1, 30), 'monthly', 1),
                                 (date(2025, 8, 31), 'quarterly', 3)):
    end = add(start, 5 * months)
    seen = generate_schedule(start, end, frequency, convention='unadjusted')
    print(f'{frequency} from {start}:', *[day.strftime('%d.%m.') for day in seen], '; by hand',
          *[add(start, part * months).strftime('%d.%m.') for part in range(6)])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

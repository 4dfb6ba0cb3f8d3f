#!/usr/bin/env bash
# br-market-calendar puts the months of two years in the order of their names.
#
# Packages: br-market-calendar 0.2.3, python-dateutil 2.9.0.post0.
# Behaviour: business_days_per_month returns an OrderedDict that is sorted by keys such as "11/2025", as
#   text: January of 2026 comes before November of 2025, and the Januaries of all years come first.
# Expected: the months in the order of time, as the days that were counted.
# Instead: sort the keys by year and month.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'br-market-calendar==0.2.3' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
2025-11-03 to 2026-02-27: 01/2026: 21 02/2026: 20 11/2025: 20 12/2025: 22 ; by hand 11/2025: 20 12/2025: 22 01/2026: 21 02/2026: 20 ; same counts True
2024-12-02 to 2026-01-30: 01/2025: 23 01/2026: 21 02/2025: 20 03/2025: 21 04/2025: 22 ; by hand 12/2024: 22 01/2025: 23 02/2025: 20 03/2025: 21 04/2025: 22 ; same counts True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from br_market_calendar.calendar import BrazilFinancialCalendar

days = BrazilFinancialCalendar.from_holidays(['2025-12-25', '2026-01-01'])
for start, end in ((date(2025, 11, 3), date(2026, 2, 27)), (date(2024, 12, 2), date(2026, 1, 30))):
    seen = days.business_days_per_month(start, end)
    hand, day = {}, start
    while day <= end:
        if day.weekday() < 5 and day not in (date(2025, 12, 25), date(2026, 1, 1)):
            hand[day.strftime('%m/%Y')] = hand.get(day.strftime('%m/%Y'), 0) + 1
        day += timedelta(1)
    print(f'{start} to {end}:', *[f'{month}: {count}' for month, count in list(seen.items())[:5]],
          '; by hand', *[f'{month}: {count}' for month, count in list(hand.items())[:5]],
          '; same counts', dict(seen) == hand)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

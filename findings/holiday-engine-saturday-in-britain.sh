#!/usr/bin/env bash
# The British calendar of holiday-engine gives no day off where New Year's Day is on a Saturday.
#
# Packages: holiday-engine 1.2.0, holidays 0.109.
# Behaviour: its file says that Saturday to Monday is handled "natively", but the rules have no such shift, only
#   Sunday to Monday: Monday 3 January 2022 is a business day. Of Christmas and Boxing Day on a weekend, the
#   second substitute day is lost as well, which the file mentions and the function does not.
# Expected: a bank holiday on the next weekday, as in the package holidays and in every official list.
# Instead: take the package holidays, with holidays.UK(subdiv='ENG').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'holiday-engine==1.2.0' 'holidays==0.109' 'python-dateutil==2.9.0.post0' 'six==1.17.0'
cat > expected.txt <<'EXPECTED'
Tue 28 Dec 2021: business day True; by the package holidays False, Boxing Day (observed)
Mon 03 Jan 2022: business day True; by the package holidays False, New Year's Day (observed)
Tue 27 Dec 2022: business day True; by the package holidays False, Christmas Day (observed)
New Year on a Saturday: 2000 2005 2011 2022 2028 2033 2039
Monday after it is a business day: True True True True True True True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta
import holidays
from isholiday import is_business_day

for first, last in ((date(2021, 12, 24), date(2022, 1, 4)), (date(2022, 12, 24), date(2023, 1, 3))):
    official = holidays.UK(subdiv='ENG', years=range(first.year, last.year + 1))
    day = first
    while day <= last:
        open_here = is_business_day(day, calendar='uk')
        open_there = day.weekday() < 5 and day not in official
        if open_here != open_there:
            print(f'{day:%a %d %b %Y}: business day {open_here}; by the package holidays {open_there}, {official.get(day)}')
        day += timedelta(days=1)
years = [year for year in range(2000, 2040) if date(year, 1, 1).weekday() == 5]
print('New Year on a Saturday:', *years)
print('Monday after it is a business day:', *[is_business_day(date(year, 1, 3), calendar='uk') for year in years])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# holiday-engine closes banks and the exchange on Fridays on which they are open.
#
# Packages: holiday-engine 1.2.0, holidays 0.109.
# Behaviour: a holiday on a Saturday is moved to Friday in the calendars "market", the New York exchange, and
#   "banking", the Federal Reserve. The exchange does not do so for New Year's Day: it traded on 31 December
#   2010 and 2021, and the README names 31 December 2027 as handled correctly. The Federal Reserve never does
#   so: its banks are open on the Friday before. Its list has no Good Friday either.
# Expected: business days, as in the package holidays for the exchange and in the Federal Reserve's list.
# Instead: take holidays.financial_holidays('XNYS'); for banks set saturday_to_friday = false in a file of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'holiday-engine==1.2.0' 'holidays==0.109' 'python-dateutil==2.9.0.post0' 'six==1.17.0'
cat > expected.txt <<'EXPECTED'
exchange, Fri 31 Dec 2010: New Year's Day, business day False; by the package holidays True
exchange, Fri 31 Dec 2021: New Year's Day, business day False; by the package holidays True
exchange, Fri 31 Dec 2027: New Year's Day, business day False; by the package holidays True
exchange, Fri 03 Jul 2026: business day False; by the package holidays False
bank, Fri 03 Jul 2026: Independence Day, business day False
bank, Fri 18 Jun 2027: Juneteenth National Independence Day, business day False
bank, Fri 24 Dec 2027: Christmas Day, business day False
bank, Fri 03 Apr 2026: Good Friday
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date
import holidays
from isholiday import get_holiday, get_holidays, is_business_day

exchange = holidays.financial_holidays('XNYS', years=range(2010, 2029))
for day in (date(2010, 12, 31), date(2021, 12, 31), date(2027, 12, 31)):
    print(f'exchange, {day:%a %d %b %Y}: {get_holiday(day, "market")}, business day {is_business_day(day, "market")}; '
          f'by the package holidays {day not in exchange}')
day = date(2026, 7, 3)
print(f'exchange, {day:%a %d %b %Y}: business day {is_business_day(day, "market")}; by the package holidays {day not in exchange}')
for day in (date(2026, 7, 3), date(2027, 6, 18), date(2027, 12, 24)):
    print(f'bank, {day:%a %d %b %Y}: {get_holiday(day, "banking")}, business day {is_business_day(day, "banking")}')
listed = [name for day, name in get_holidays(2026, "banking") if day == date(2026, 4, 3)]
print('bank, Fri 03 Apr 2026:', *listed)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

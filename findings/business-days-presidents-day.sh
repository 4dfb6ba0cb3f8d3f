#!/usr/bin/env bash
# business-days has Presidents' Day on a Thursday in 2021, 2022 and 2023, so a payment falls due on a bank
# holiday and waits on an ordinary day; holidays on a Sunday are lost, and from 2027 on there are none.
#
# Packages: business-days 0.0.8.
# Behaviour: the package has a list of the holidays of a bank, by hand. For three years it has 16 to 18
#   February for the third Monday of the month. A holiday on a Sunday is in the list as the Sunday and
#   not as the Monday on which banks are closed (4 July 2021, New Year 2023, Christmas 2022), and
#   Juneteenth, a holiday since 2021, is there from 2024 on. Days after 2026 have no holiday, without a
#   message.
# Expected: the Mondays on which the Federal Reserve Banks were closed; an error for a year without a
#   list.
# Instead: holidays.financial_holidays('NYSE'), or a calendar of the bank.
# Source: the holiday schedule of the Federal Reserve Banks, by its rule: the third Monday of February,
#   and the Monday after a holiday on a Sunday.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'business-days==0.0.8'
cat > expected.txt <<'EXPECTED'
Presidents' Day Mon 18.02.2019, listed Mon 18.02.2019
Presidents' Day Mon 17.02.2020, listed Mon 17.02.2020
Presidents' Day Mon 15.02.2021, listed Thu 18.02.2021
Presidents' Day Mon 21.02.2022, listed Thu 17.02.2022
Presidents' Day Mon 20.02.2023, listed Thu 16.02.2023
Presidents' Day Mon 19.02.2024, listed Mon 19.02.2024
Presidents' Day Mon 17.02.2025, listed Mon 17.02.2025
Presidents' Day Mon 16.02.2026, listed Mon 16.02.2026
4 July 2021, observed, Mon 05.07.2021: business day True
Juneteenth 2022, observed, Mon 20.06.2022: business day True
Christmas 2022, observed, Mon 26.12.2022: business day True
New Year 2023, observed, Mon 02.01.2023: business day True
New Year 2027, Fri 01.01.2027: business day True
one business day after Wed 15.02.2023: Fri 17.02.2023, of the banks Thu 16.02.2023
one business day after Fri 17.02.2023: Mon 20.02.2023, of the banks Tue 21.02.2023
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

import business_days


def find_third_monday(year):
    first = date(year, 2, 1)
    return first + timedelta(days=(7 - first.weekday()) % 7 + 14)


for year in range(2019, 2027):
    listed = [day for day in business_days.business_days.HOLIDAYS if day.startswith(f'{year}-02')]
    print(f"Presidents' Day {find_third_monday(year):%a %d.%m.%Y}, listed "
          f'{date.fromisoformat(listed[0]):%a %d.%m.%Y}')
DAYS = {
    '4 July 2021, observed': date(2021, 7, 5),
    'Juneteenth 2022, observed': date(2022, 6, 20),
    'Christmas 2022, observed': date(2022, 12, 26),
    'New Year 2023, observed': date(2023, 1, 2),
    'New Year 2027': date(2027, 1, 1),
}
for name, day in DAYS.items():
    print(f'{name}, {day:%a %d.%m.%Y}: business day {business_days.is_business_day(day)}')
for start, right in ((date(2023, 2, 15), date(2023, 2, 16)), (date(2023, 2, 17), date(2023, 2, 21))):
    due = business_days.days_from_now(start, 1)
    print(f'one business day after {start:%a %d.%m.%Y}: {due:%a %d.%m.%Y}, of the banks {right:%a %d.%m.%Y}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

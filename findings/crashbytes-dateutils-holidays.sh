#!/usr/bin/env bash
# The business days of crashbytes-dateutils ignore holidays for dates with a time.
#
# Packages: crashbytes-dateutils 1.1.11.
# Behaviour: the functions take a date and a list of holidays, and a datetime is a date in Python that
#   other functions of the package ask for. A datetime is never equal to a date, so that no holiday is
#   found: one business day after 24 December 2026 at 9:00 is 25 December, which is in the list, and
#   is_business_day says that this is a business day. Weekends are recognised.
# Expected: the same day for a date with and without a time, or an error.
# Instead: call date() on the value first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'crashbytes-dateutils==1.1.11'
cat > expected.txt <<'EXPECTED'
date: 2026-12-25 is a business day: False, one after 2026-12-24: 2026-12-28, business days to 2027-01-04: 5
date with a time: 2026-12-25 09:00:00 is a business day: True, one after 2026-12-24 09:00:00: 2026-12-25 09:00:00, business days to 2027-01-04: 7
end_of_day takes a date with a time: 2026-12-24 23:59:59.999999
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, datetime, time

from crashbytes_dateutils import add_business_days, business_days_between, end_of_day, is_business_day

holidays = [date(2026, 12, 25), date(2027, 1, 1)]
christmas, eve, later = date(2026, 12, 25), date(2026, 12, 24), date(2027, 1, 4)
for name, convert in (('date', lambda day: day), ('date with a time', lambda day: datetime.combine(day, time(9)))):
    print(f'{name}: {convert(christmas)} is a business day: {is_business_day(convert(christmas), holidays)},',
          f'one after {convert(eve)}: {add_business_days(convert(eve), 1, holidays)},',
          f'business days to {later}: {business_days_between(convert(eve), convert(later), holidays)}')
print('end_of_day takes a date with a time:', end_of_day(datetime(2026, 12, 24, 9)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# canada-holiday looks at the first holiday of a month alone: 30 September and Boxing Day, which it lists
# for Ontario, are ordinary days, and Good Friday is one in March.
#
# Packages: canada-holiday 1.1.4.
# Behaviour: is_holiday leaves its loop after the first holiday of the month that it finds, whether it is the
#   day that was asked for or not. Good Friday and Easter Monday have the month April, so in March nothing is found.
# Expected: True for each day that get_holidays of the package lists.
# Why it matters here: business days and deadlines are computed with it.
# Instead: any(holiday.date == day for holiday in get_holidays(province, year)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'canada-holiday==1.1.4'
cat > expected.txt <<'EXPECTED'
2024-03-29 in Ontario: is_holiday None, listed as Good Friday
2024-07-01 in Ontario: is_holiday True, listed as Canada Day
2024-09-02 in Ontario: is_holiday True, listed as Labour Day
2024-09-30 in Ontario: is_holiday False, listed as National Day for Truth and Reconciliation
2024-12-25 in Ontario: is_holiday True, listed as Christmas Day
2024-12-26 in Ontario: is_holiday False, listed as Boxing Day
Ontario, 2020 to 2029: 87 of 110 holidays are found
Quebec, 2020 to 2029: 79 of 90 holidays are found
Newfoundland and Labrador, 2020 to 2029: 67 of 90 holidays are found
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from contextlib import redirect_stdout
from datetime import date
from io import StringIO

from canada_holiday import get_holidays, is_holiday

for day in (date(2024, 3, 29), date(2024, 7, 1), date(2024, 9, 2), date(2024, 9, 30), date(2024, 12, 25), date(2024, 12, 26)):
    with redirect_stdout(StringIO()):
        found = is_holiday(day, 'Ontario')
        listed = [holiday.name for holiday in get_holidays('Ontario', day.year) if holiday.date == day]
    print(f'{day} in Ontario: is_holiday {found}, listed as {listed[0]}')
for province in ('Ontario', 'Quebec', 'Newfoundland and Labrador'):
    with redirect_stdout(StringIO()):
        days = sorted({day for year in range(2020, 2030) for day in
                       [holiday.date for holiday in get_holidays(province, year)]})
        found = sum(bool(is_holiday(day, province)) for day in days)
    print(f'{province}, 2020 to 2029: {found} of {len(days)} holidays are found')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

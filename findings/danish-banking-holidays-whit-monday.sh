#!/usr/bin/env bash
# danish-banking-holidays does not know a Whit Monday in 2006, 2017 and 2028, nor a Whit Sunday in 2022 and 2033: Constitution
# Day on 5 June takes its place.
#
# Packages: danish-banking-holidays 0.2.1.
# Behaviour: the holidays of a year are a dictionary by date, with 5 June entered last, so that the name of a feast of
#   Easter that falls on it is lost: get_holiday returns None, and get_holiday_name the other name.
# Expected: Whit Monday 50 days after Easter in each year, as the package has it for the other years.
# Why it matters here: None reads as a year without the holiday.
# Instead: compute it from Easter.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'danish-banking-holidays==0.2.1'
cat > expected.txt <<'EXPECTED'
2. Pinsedag, 2000 to 2040: None for 2006 (it is 2006-06-05, which is called Grundlovsdag), 2017 (it is 2017-06-05, which is called Grundlovsdag), 2028 (it is 2028-06-05, which is called Grundlovsdag)
Pinsedag, 2000 to 2040: None for 2022 (it is 2022-06-05, which is called Grundlovsdag), 2033 (it is 2033-06-05, which is called Grundlovsdag)
2. Pinsedag 2018: 2018-05-21
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import timedelta

from danish_banking_holidays import DanishBankingCalendar

calendar = DanishBankingCalendar()
for name, days in (('2. Pinsedag', 50), ('Pinsedag', 49)):
    missing = []
    for year in range(2000, 2041):
        easter = next(iter(calendar.get_holiday(year, 'Påske')))
        if calendar.get_holiday(year, name) is None:
            missing.append(f'{year} (it is {easter + timedelta(days)}, which is called '
                           f'{calendar.get_holiday_name(easter + timedelta(days))})')
    print(f'{name}, 2000 to 2040: None for {", ".join(missing)}')
print('2. Pinsedag 2018:', next(iter(calendar.get_holiday(2018, '2. Pinsedag'))))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

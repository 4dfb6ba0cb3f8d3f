#!/usr/bin/env bash
# A job of python-networkdays gets fewer days than its hours need.
#
# Packages: python-networkdays 1.2.
# Behaviour: JobSchedule divides the hours of a job by the hours of a day, and adds as many calendar days to
#   the start to find the end. The weekends in between are lost: a job of 160 hours at 8 a day has 15 days
#   rather than 20, and the README's example of 120 hours has 12, not the 15 that the README gives.
# Expected: as many workdays as the hours need.
# Instead: pass a Networkdays that reaches far enough.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-networkdays==1.2'
cat > expected.txt <<'EXPECTED'
40 hours at 8 a day from 2024-07-01: 5 days to 2024-07-05; with a long calendar 5 to 2024-07-05; by hand 5 to 2024-07-05
80 hours at 8 a day from 2024-07-01: 9 days to 2024-07-11; with a long calendar 10 to 2024-07-12; by hand 10 to 2024-07-12
120 hours at 8 a day from 2024-07-01: 12 days to 2024-07-16; with a long calendar 15 to 2024-07-19; by hand 15 to 2024-07-19
160 hours at 8 a day from 2024-07-01: 15 days to 2024-07-19; with a long calendar 20 to 2024-07-26; by hand 20 to 2024-07-26
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from networkdays.networkdays import JobSchedule, Networkdays

for hours in (40, 80, 120, 160):
    start = date(2024, 7, 1)
    seen = JobSchedule(hours, 8, start)
    wide = JobSchedule(hours, 8, start, Networkdays(start, date(2024, 12, 31)))
    day, left = start, hours
    while True:
        left -= 8 if day.weekday() < 5 else 0
        if left <= 0:
            break
        day += timedelta(1)
    print(f'{hours} hours at 8 a day from {start}: {seen.bussines_days} days to {seen.jobdays[-1]};',
          f'with a long calendar {wide.bussines_days} to {wide.jobdays[-1]}; by hand {hours // 8} to {day}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The schedule that networkdays makes for a job ends early without a message: a job of 50 working days has
# 37, and the documented example of 15 has 12.
#
# Packages: python-networkdays 1.2.
# Behaviour: without a calendar of its own, JobSchedule looks for working days among as many calendar days
#   as the job has working days, so its weekends are missing from the job. bussines_days, prj_ends and
#   the days by week and month are of the shorter job.
# Expected: 120 hours of 8 a day from 1 July 2024 on are 15 working days, until 19 July, as its
#   documentation says.
# Instead: give it Networkdays with an end that is far away, and compare bussines_days with the hours.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-networkdays==1.2'
cat > expected.txt <<'EXPECTED'
40 hours of 8 a day from 2026-11-02: 5 days until 2026-11-06; with a long calendar 5 until 2026-11-06
80 hours of 8 a day from 2026-11-02: 9 days until 2026-11-12; with a long calendar 10 until 2026-11-13
400 hours of 8 a day from 2026-11-02: 37 days until 2026-12-22; with a long calendar 50 until 2027-01-08
1600 hours of 8 a day from 2026-11-02: 145 days until 2027-05-21; with a long calendar 200 until 2027-08-06
120 hours of 8 a day from 2024-07-01: 12 days until 2024-07-16; with a long calendar 15 until 2024-07-19
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from networkdays.networkdays import JobSchedule, Networkdays

for hours, start in ((40, date(2026, 11, 2)), (80, date(2026, 11, 2)), (400, date(2026, 11, 2)),
                     (1600, date(2026, 11, 2)), (120, date(2024, 7, 1))):
    job = JobSchedule(hours, 8, start)
    given = JobSchedule(hours, 8, start, Networkdays(start, date(start.year + 2, 1, 1)))
    print(f'{hours} hours of 8 a day from {start}: {job.bussines_days} days until {job.jobdays[-1]}; '
          f'with a long calendar {given.bussines_days} until {given.jobdays[-1]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

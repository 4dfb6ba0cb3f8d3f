#!/usr/bin/env bash
# businesstimedelta counts no hour of a night shift for a time that begins within it: from 22:00 to 6:00 are 0 hours, and from
# 21:00 to 6:00 eight.
#
# Packages: businesstimedelta 1.0.1, pytz 2026.6.
# Behaviour: WorkDayRule documents that "overnight shifts can be represented by setting end time less than start time". A
#   shift of today is taken if the time is before the later one of its ends, 22:00, and begins at 22:00 of this day: at 2:00
#   the shift of the evening before is not looked at, and from 22:00 on the one of the next day is taken.
# Expected: the hours between 22:00 and 6:00, as they are counted minute by minute here.
# Why it matters here: hours of wards and of call centres, and deadlines that run in them.
# Instead: two rules, one until midnight and one from it on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pytz==2026.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'businesstimedelta==1.0.1'
cat > expected.txt <<'EXPECTED'
Tuesday 21:00 to Wednesday 06:00: <BusinessTimeDelta 8 hours 0 seconds>, by the minute 8 hours
Tuesday 22:00 to Wednesday 06:00: <BusinessTimeDelta 0 hours 0 seconds>, by the minute 8 hours
Tuesday 23:00 to Wednesday 06:00: <BusinessTimeDelta 0 hours 0 seconds>, by the minute 7 hours
Wednesday 00:00 to Wednesday 06:00: <BusinessTimeDelta 0 hours 0 seconds>, by the minute 6 hours
Wednesday 02:00 to Wednesday 04:00: <BusinessTimeDelta 0 hours 0 seconds>, by the minute 2 hours
Tuesday 12:00 to Friday 12:00: <BusinessTimeDelta 24 hours 0 seconds>, by the minute 24 hours
Tuesday 22:00 to Saturday 06:00: <BusinessTimeDelta 24 hours 0 seconds>, by the minute 32 hours
Wednesday 00:00 and 2 hours of work: Thursday 00:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import businesstimedelta
import pytz

night = businesstimedelta.WorkDayRule(start_time=datetime.time(22), end_time=datetime.time(6),
                                      working_days=[0, 1, 2, 3, 4], tz=pytz.utc)


def count(start, end):
    minutes = 0
    while start < end:
        evening = start.date() if start.hour >= 22 else start.date() - datetime.timedelta(1)
        minutes += (start.hour >= 22 or start.hour < 6) and evening.weekday() < 5
        start += datetime.timedelta(minutes=1)
    return minutes / 60


for first, last in (((1, 21), (2, 6)), ((1, 22), (2, 6)), ((1, 23), (2, 6)), ((2, 0), (2, 6)), ((2, 2), (2, 4)),
                    ((1, 12), (4, 12)), ((1, 22), (5, 6))):
    start, end = (datetime.datetime(2026, 12, *moment) for moment in (first, last))
    print(f'{start:%A %H:%M} to {end:%A %H:%M}: {night.difference(start, end)}, by the minute {count(start, end):g} hours')
start = datetime.datetime(2026, 12, 2, 0)
print(f'{start:%A %H:%M} and 2 hours of work: {start + businesstimedelta.BusinessTimeDelta(night, hours=2):%A %H:%M}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

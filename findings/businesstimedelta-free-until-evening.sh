#!/usr/bin/env bash
# businesstimedelta ignores time off that lasts until the end of work or longer: with the afternoon from 14:00 to 18:00 off a
# day from 9:00 to 18:00 has nine hours in place of five.
#
# Packages: businesstimedelta 1.0.1, pytz 2026.6.
# Behaviour: Rules ends a block of work where time off begins if the time off ends before the work does. Where it ends at
#   the same time or later, nothing is taken off. Time off that begins before the work is taken off.
# Expected: the hours of work that are not off, as they are counted by the minute here.
# Why it matters here: a half holiday, Friday afternoon or Christmas Eve, counts as a whole working day.
# Instead: let the time off end a minute before the work does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pytz==2026.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'businesstimedelta==1.0.1'
cat > expected.txt <<'EXPECTED'
9 to 18, 12 to 13 off: <BusinessTimeDelta 8 hours 0 seconds>, by the minute 8 hours; 13:00 and 3 hours: Wednesday 16:00
9 to 18, 8 to 10 off: <BusinessTimeDelta 8 hours 0 seconds>, by the minute 8 hours; 13:00 and 3 hours: Wednesday 16:00
9 to 18, 14 to 17 off: <BusinessTimeDelta 6 hours 0 seconds>, by the minute 6 hours; 13:00 and 3 hours: Thursday 10:00
9 to 18, 14 to 18 off: <BusinessTimeDelta 9 hours 0 seconds>, by the minute 5 hours; 13:00 and 3 hours: Wednesday 16:00
9 to 18, 14 to 20 off: <BusinessTimeDelta 9 hours 0 seconds>, by the minute 5 hours; 13:00 and 3 hours: Wednesday 16:00
9 to 18, 17 to 19 off: <BusinessTimeDelta 9 hours 0 seconds>, by the minute 8 hours; 13:00 and 3 hours: Wednesday 16:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import businesstimedelta
import pytz

WEEK = [0, 1, 2, 3, 4]
work = businesstimedelta.WorkDayRule(start_time=datetime.time(9), end_time=datetime.time(18), working_days=WEEK, tz=pytz.utc)
start, end = datetime.datetime(2026, 12, 2), datetime.datetime(2026, 12, 3)
for first, last in ((12, 13), (8, 10), (14, 17), (14, 18), (14, 20), (17, 19)):
    off = businesstimedelta.LunchTimeRule(start_time=datetime.time(first), end_time=datetime.time(last), working_days=WEEK,
                                          tz=pytz.utc)
    rules = businesstimedelta.Rules([work, off])
    right = sum(9 <= minute / 60 < 18 and not first <= minute / 60 < last for minute in range(1440)) / 60
    noon = datetime.datetime(2026, 12, 2, 13)
    print(f'9 to 18, {first} to {last} off: {rules.difference(start, end)}, by the minute {right:g} hours; '
          f'13:00 and 3 hours: {noon + businesstimedelta.BusinessTimeDelta(rules, hours=3):%A %H:%M}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

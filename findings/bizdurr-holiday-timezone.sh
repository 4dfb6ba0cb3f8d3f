#!/usr/bin/env bash
# bizdurr looks for a holiday under the date of the caller's time zone, and for the hours in its own.
#
# Packages: bizdurr 2.0.1.
# Behaviour: is_within_business_hours takes the date of the time that it was given for the holidays, and converts
#   the time to the zone of the business only for the hours. Half past four in the afternoon of 25 December in
#   Los Angeles, given in UTC, is not a holiday, and the same hour of 24 December is one. calculate of the
#   same object converts first, and finds the reverse.
# Expected: the holidays of the business in both.
# Instead: convert the time to the zone of the business before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bizdurr==2.0.1'
cat > expected.txt <<'EXPECTED'
23.12. 16:30 in Los Angeles: open True as local time, True as 24.12. 00:30 UTC; calculate 10 of 10 minutes; by hand True
24.12. 16:30 in Los Angeles: open True as local time, False as 25.12. 00:30 UTC; calculate 10 of 10 minutes; by hand True
25.12. 16:30 in Los Angeles: open False as local time, True as 26.12. 00:30 UTC; calculate 0 of 10 minutes; by hand False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from bizdurr import BusinessDuration

zone = ZoneInfo('America/Los_Angeles')
shop = BusinessDuration({'start': '09:00', 'end': '17:00'}, 'America/Los_Angeles', holidays=['2025-12-25'])
for day in (23, 24, 25):
    local = datetime(2025, 12, day, 16, 30, tzinfo=zone)
    world = local.astimezone(timezone.utc)
    minutes = shop.calculate(world, world + timedelta(minutes=10)).seconds // 60
    print(f'{local:%d.%m. %H:%M} in Los Angeles: open {shop.is_within_business_hours(local)} as local time,',
          f'{shop.is_within_business_hours(world)} as {world:%d.%m. %H:%M} UTC; calculate {minutes} of 10 minutes;',
          'by hand', day != 25)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

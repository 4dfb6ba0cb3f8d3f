#!/usr/bin/env bash
# The business time of bizdurr is longer than the whole interval where the clocks change.
#
# Packages: bizdurr 2.0.1.
# Behaviour: calculate subtracts the readings of the clock of the business. On 30 March 2025 the clocks in Berlin
#   go from 2 to 3: the night from 0 to 8 has seven hours, and calculate returns eight, for a start and an
#   end in UTC that are seven hours apart. On 26 October it returns eight of nine.
# Expected: seven and nine hours, never more than the interval.
# Instead: convert both ends to UTC and subtract, where the clocks change within the hours.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bizdurr==2.0.1'
cat > expected.txt <<'EXPECTED'
29.3. from 23:00 to 07:00 UTC, 8 hours: business time 8 hours
30.3. from 23:00 to 06:00 UTC, 7 hours: business time 8 hours
26.10. from 22:00 to 07:00 UTC, 9 hours: business time 8 hours
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

from bizdurr import BusinessDuration

zone = ZoneInfo('Europe/Berlin')
night = {day: {'start': '00:00', 'end': '08:00'} for day in ('saturday', 'sunday')}
shop = BusinessDuration(night, 'Europe/Berlin')
for month, day in ((3, 29), (3, 30), (10, 26)):
    start, end = (datetime(2025, month, day, hour, tzinfo=zone).astimezone(timezone.utc) for hour in (0, 8))
    print(f'{day}.{month}. from {start:%H:%M} to {end:%H:%M} UTC, {(end - start).total_seconds() / 3600:g} hours:',
          f'business time {shop.calculate(start, end).total_seconds() / 3600:g} hours')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

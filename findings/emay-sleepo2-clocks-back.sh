#!/usr/bin/env bash
# emay-sleepo2 corrects nothing in the night in which the clocks go back: the hour that comes twice has the same times twice,
# against its own DSTFoldCorrector, and eight hours of oxygen saturation become seven.
#
# Packages: emay-sleepo2 1.0.6, tzdata 2025.2.
# Behaviour: the export of the oximeter has local times. A jump back of up to two hours is corrected if the clocks were set
#   back near the last reading: if summer time holds an hour before it and not at it. The last reading before the jump is at
#   1:59 in summer time, so that the condition is false for each zone, and the readings keep the times of the file.
# Expected: times that go on, as correct_dst_fold=True, the default, and the class say: "Without correction, the repeated
#   1-2 AM hour on clocks-back night produces duplicate wall-clock timestamps, silently erasing an hour of real data".
# Why it matters here: an index of desaturations per hour divides by the time, and a table by time loses half of two hours.
# Instead: give the readings times from the first one and the distance of the rows.
# Source: the seconds between the rows of the file, one a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'emay-sleepo2==1.0.6' 'tzdata==2025.2'
cat > expected.txt <<'EXPECTED'
America/New_York, night of 01 November: 480 readings in 6.98 hours, true 7.98; times that occur twice 60, steps back 1, warnings 0
Europe/Berlin, night of 24 October: 480 readings in 6.98 hours, true 7.98; times that occur twice 60, steps back 1, warnings 0
America/New_York, night of 07 November: 480 readings in 7.98 hours, true 7.98; times that occur twice 0, steps back 0, warnings 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo
from emay_sleepo2 import parse_csv

for name, start in (('America/New_York', datetime(2026, 11, 1, 3)), ('Europe/Berlin', datetime(2026, 10, 24, 22)),
                    ('America/New_York', datetime(2026, 11, 7, 3))):
    zone = ZoneInfo(name)
    true = [start.replace(tzinfo=timezone.utc) + timedelta(minutes=minute) for minute in range(8 * 60)]
    rows = [time.astimezone(zone).strftime('%m/%d/%Y,%I:%M:%S %p,96,60') for time in true]
    readings, warnings = parse_csv('\n'.join(['Date,Time,SpO2(%),PR(bpm)', *rows]), timezone=zone)
    seen = [reading.timestamp.replace(tzinfo=None) for reading in readings]
    hours = (seen[-1] - seen[0]).total_seconds() / 3600
    print(f'{name}, night of {start:%d %B}: {len(seen)} readings in {hours:.2f} hours, true {(true[-1] - true[0]).total_seconds() / 3600:.2f};',
          f'times that occur twice {len(seen) - len(set(seen))}, steps back {sum(b < a for a, b in zip(seen, seen[1:]))}, warnings {len(warnings)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

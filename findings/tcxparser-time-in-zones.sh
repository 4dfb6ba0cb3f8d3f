#!/usr/bin/env bash
# python-tcxparser gives the time of points without a heart rate to other heart rates.
#
# Packages: python-tcxparser 2.4.0, lxml 6.1.3, python-dateutil 2.9.0.
# Behaviour: hr_time_in_zones pairs the first heart rate with the time of the first point, the
#   second with the second, and so on. Heart rates that are missing are not in the one list and are
#   in the other, so all later ones get the time of earlier points, and the last times are dropped.
#   cadence_avg is the mean of the last lap, not of the workout.
# Expected: the time of the points that have the heart rate; the mean over the laps.
# Why it matters here: minutes in a zone are a dose of training, and sensors lose contact in each
#   workout.
# Instead: the points and their times, as tcxreader returns them with only_gps=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-tcxparser==2.4.0' 'lxml==6.1.3' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
time at 150 beats: 0:05:30, 170 beats: 0:04:55 ; recorded 0:01:00 and 0:01:00
cadence: mean 60 ; recorded 80.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime, timedelta

from tcxparser import TCXParser

SCHEMA = 'http://www.garmin.com/xmlschemas/TrainingCenterDatabase/v2'
start = datetime(2026, 3, 15, 8)
# the strap is put on after ten minutes; then a minute at 150, a minute at 170 beats
points = [(60 * minute, None) for minute in range(10)]
points += [(600 + 10 * step, 150) for step in range(6)] + [(660 + 10 * step, 170) for step in range(7)]


def lap(points, cadence):
    track = ''.join(
        f'<Trackpoint><Time>{(start + timedelta(seconds=second)).isoformat()}Z</Time>'
        + (f'<HeartRateBpm><Value>{rate}</Value></HeartRateBpm>' if rate else '')
        + f'<Cadence>{cadence}</Cadence></Trackpoint>' for second, rate in points)
    return (f'<Lap StartTime="2026-03-15T08:00:00Z"><TotalTimeSeconds>360</TotalTimeSeconds>'
            f'<Cadence>{cadence}</Cadence><Track>{track}</Track></Lap>')


with open('workout.tcx', 'w') as file:
    file.write(f'<TrainingCenterDatabase xmlns="{SCHEMA}"><Activities><Activity Sport="Biking"><Id>1</Id>'
               f'{lap(points[:16], 90)}{lap(points[16:], 60)}</Activity></Activities></TrainingCenterDatabase>')
workout = TCXParser('workout.tcx')
zones = workout.hr_time_in_zones({'150 beats': (140, 159), '170 beats': (160, 179)})
print('time at', ', '.join(f'{name}: {time}' for name, time in zones.items()), '; recorded 0:01:00 and 0:01:00')
print('cadence: mean', workout.cadence_avg, '; recorded', round((90 * 16 + 60 * 7) / 23, 1))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

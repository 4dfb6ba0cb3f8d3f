#!/usr/bin/env bash
# tcxreader drops the heart rate of all points without a position, a whole treadmill workout with
# them.
#
# Packages: tcxreader 0.4.11.
# Behaviour: read() has the default only_gps=True, which is described as removing points without a
#   position at the start and the end. It removes them everywhere, and computes mean, largest and
#   smallest values from what is left. A workout indoors has no points and no heart rate.
# Expected: the points between the first and the last position stay; a file without any position has
#   none to cut.
# Why it matters here: heart rates of effort are missing where the sky is, and indoor patients look
#   like ones without a sensor.
# Instead: read(..., only_gps=False).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tcxreader==0.4.11'
cat > expected.txt <<'EXPECTED'
run with a tunnel, recorded: 15 points, mean 130.0, largest 180
run with a tunnel, by default: 10 points, mean 105.0, largest 110
run with a tunnel, only_gps=False: 15 points, mean 130.0, largest 180
treadmill, recorded: 15 points, mean 130.0, largest 180
treadmill, by default: 0 points, mean None, largest None
treadmill, only_gps=False: 15 points, mean 130.0, largest 180
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tcxreader.tcxreader import TCXReader

SCHEMA = 'http://www.garmin.com/xmlschemas/TrainingCenterDatabase/v2'
POSITION = '<Position><LatitudeDegrees>48.1</LatitudeDegrees><LongitudeDegrees>11.5</LongitudeDegrees></Position>'


def read(points, **settings):
    track = ''.join(
        f'<Trackpoint><Time>2026-03-15T08:00:{second:02}Z</Time>{POSITION if outside else ""}'
        f'<HeartRateBpm><Value>{rate}</Value></HeartRateBpm></Trackpoint>'
        for second, (rate, outside) in enumerate(points))
    with open('workout.tcx', 'w') as file:
        file.write(f'<TrainingCenterDatabase xmlns="{SCHEMA}"><Activities><Activity Sport="Running">'
                   f'<Id>2026-03-15T08:00:00Z</Id><Lap StartTime="2026-03-15T08:00:00Z"><Calories>100</Calories>'
                   f'<DistanceMeters>100</DistanceMeters><Track>{track}</Track></Lap></Activity></Activities>'
                   '</TrainingCenterDatabase>')
    workout = TCXReader().read('workout.tcx', **settings)
    return f'{len(workout.trackpoints)} points, mean {workout.hr_avg}, largest {workout.hr_max}'


outdoors = [(100, True)] * 5 + [(180, False)] * 5 + [(110, True)] * 5  # through a tunnel
for name, points in {'run with a tunnel': outdoors, 'treadmill': [(rate, False) for rate, _ in outdoors]}.items():
    rates = [rate for rate, _ in points]
    print(f'{name}, recorded: {len(rates)} points, mean {sum(rates) / len(rates)}, largest {max(rates)}')
    print(f'{name}, by default: {read(points)}')
    print(f'{name}, only_gps=False: {read(points, only_gps=False)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

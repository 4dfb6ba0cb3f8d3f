#!/usr/bin/env bash
# The midpoint of distancefyi lies at a longitude of 187.72 between Tokyo and San Francisco, which its own arc of the
# same way has at -172.28.
#
# Packages: distancefyi 0.1.3.
# Behaviour: midpoint adds the difference of longitude to the first one and does not bring the sum back to -180 to
#   180; compute_distance returns it as midpoint_lon. In the other direction the longitude is -172.28.
# Expected: a longitude from -180 to 180, and the same point from both ends.
# Why it matters here: a table of places, a map and a check of coordinates do not know 187.72.
# Instead: (longitude + 180) % 360 - 180.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'distancefyi==0.1.3'
cat > expected.txt <<'EXPECTED'
Tokyo to San Francisco: midpoint 48.65, 187.72; middle of its arc 48.65, -172.28
San Francisco to Tokyo: midpoint 48.65, -172.28; middle of its arc 48.65, -172.28
Auckland to Santiago: midpoint -52.47, 233.91; middle of its arc -52.47, -126.09
Santiago to Auckland: midpoint -52.47, -126.09; middle of its arc -52.47, -126.09
Paris to Rome: midpoint 45.49, 7.74; middle of its arc 45.49, 7.74
Rome to Paris: midpoint 45.49, 7.74; middle of its arc 45.49, 7.74
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from distancefyi import great_circle_points, midpoint

CITIES = {'Tokyo': (35.6762, 139.6503), 'San Francisco': (37.7749, -122.4194), 'Auckland': (-36.8485, 174.7633),
          'Santiago': (-33.4489, -70.6693), 'Paris': (48.8566, 2.3522), 'Rome': (41.9028, 12.4964)}
for first, second in (('Tokyo', 'San Francisco'), ('San Francisco', 'Tokyo'), ('Auckland', 'Santiago'),
                      ('Santiago', 'Auckland'), ('Paris', 'Rome'), ('Rome', 'Paris')):
    middle = midpoint(*CITIES[first], *CITIES[second])
    arc = great_circle_points(*CITIES[first], *CITIES[second], num_points=2)[1]
    print(f'{first} to {second}: midpoint {middle[0]:.2f}, {middle[1]:.2f}; middle of its arc {arc[0]:.2f}, {arc[1]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

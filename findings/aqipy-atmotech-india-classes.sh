#!/usr/bin/env bash
# The Indian air quality index of aqipy-atmotech has the limits of coarse particles in the place of
# those of the index.
#
# Packages: aqipy-atmotech 0.1.5.
# Behaviour: the classes of the index are 0 to 50, 100, 200, 300, 400 and 500. aqi_in has 250 and 350
#   for the third and fourth, which are the concentrations of PM10 at their ends. So all values above
#   100 are up to 50 too large: fine particles of 90 µg/m³ have an index of 250, poor, in place of 200,
#   moderately polluted, and 120 one of 350, very poor, in place of 300.
# Expected: the classes of the published index.
# Instead: map 101 to 250 onto 101 to 200, 251 to 350 onto 201 to 300, and 351 to 400 onto 301 to 400.
# Source: Central Pollution Control Board, National Air Quality Index, 2014.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqipy-atmotech==0.1.5'
cat > expected.txt <<'EXPECTED'
PM2.5 45: index 75, which is satisfactory by the published classes; right 75
PM2.5 61: index 101, which is moderately polluted by the published classes; right 101
PM2.5 75: index 173, which is moderately polluted by the published classes; right 149
PM2.5 90: index 250, which is poor by the published classes; right 200
PM2.5 91: index 251, which is poor by the published classes; right 201
PM2.5 105: index 299, which is poor by the published classes; right 249
PM2.5 120: index 350, which is very poor by the published classes; right 300
PM2.5 180: index 374, which is very poor by the published classes; right 346
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from aqipy import aqi_in

classes = [(0, 50), (51, 100), (101, 200), (201, 300), (301, 400)]
limits = [(0, 30), (31, 60), (61, 90), (91, 120), (121, 250)]

for value in (45, 61, 75, 90, 91, 105, 120, 180):
    index = aqi_in.get_aqi_pm25_24h(value)[0]
    (low, high), (first, last) = next(pair for pair in zip(limits, classes) if value <= pair[0][1])
    right = first + (last - first) * (value - low) / (high - low)
    names = dict(zip((50, 100, 200, 300, 400, 500), aqi_in.IN_AQI_LEVELS))
    name = next(name for limit, name in names.items() if index <= limit)
    print(f'PM2.5 {value}: index {index}, which is {name} by the published classes; right {right:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

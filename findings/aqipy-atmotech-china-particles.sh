#!/usr/bin/env bash
# The Chinese air quality index of aqipy-atmotech has the limits of fine and of coarse particles
# exchanged, and an index of 0 for values between two classes.
#
# Packages: aqipy-atmotech 0.1.5.
# Behaviour: the table of PM2.5 in aqi_cn has the limits of PM10 (50, 150, 250, 350) and the one of
#   PM10 those of PM2.5 (35, 75, 115, 150). 115 µg/m³ of fine particles have an index of 83 in
#   place of 150. PM2.5 is rounded down to a tenth where the classes begin at whole numbers, and a
#   value between them, such as 50.5 or 250.5, has the index 0, excellent.
# Expected: the limits of the standard, and an index between the neighbouring ones.
# Instead: pass PM2.5 to get_aqi_pm10_24h and PM10 to get_aqi_pm25_24h, rounded to whole numbers.
# Source: HJ 633-2012, Technical Regulation on Ambient Air Quality Index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqipy-atmotech==0.1.5'
cat > expected.txt <<'EXPECTED'
35 µg/m³ as PM2.5: 35, by the standard 50; as PM10: 50, by the standard 35
75 µg/m³ as PM2.5: 63, by the standard 100; as PM10: 100, by the standard 62
100 µg/m³ as PM2.5: 75, by the standard 131; as PM10: 131, by the standard 75
115 µg/m³ as PM2.5: 83, by the standard 150; as PM10: 150, by the standard 82
150 µg/m³ as PM2.5: 100, by the standard 200; as PM10: 200, by the standard 100
250 µg/m³ as PM2.5: 150, by the standard 300; as PM10: 299, by the standard 150
PM2.5 of 50.0, 50.5, 150.5 and 250.5: [50, 0, 0, 0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from aqipy import aqi_cn

classes = [0, 50, 100, 150, 200, 300, 400, 500]
limits = {'PM2.5': [0, 35, 75, 115, 150, 250, 350, 500], 'PM10': [0, 50, 150, 250, 350, 420, 500, 600]}

def index(pollutant, value):
    steps = limits[pollutant]
    for low, high, first, last in zip(steps, steps[1:], classes, classes[1:]):
        if value <= high:
            return first + (last - first) * (value - low) / (high - low)

for value in (35, 75, 100, 115, 150, 250):
    print(f'{value} µg/m³ as PM2.5: {aqi_cn.get_aqi_pm25_24h(value)[0]}, by the standard {index("PM2.5", value):.0f};',
          f'as PM10: {aqi_cn.get_aqi_pm10_24h(value)[0]}, by the standard {index("PM10", value):.0f}')
print('PM2.5 of 50.0, 50.5, 150.5 and 250.5:', [aqi_cn.get_aqi_pm25_24h(value)[0] for value in (50.0, 50.5, 150.5, 250.5)])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# aqicalc returns the concentration as the air quality index where it cannot compute one.
#
# Packages: aqicalc 0.0.8.1.
# Behaviour: to_iaqi catches each error and returns its argument. Errors are raised by all values of the
#   highest class of three of its standards, whose upper end is infinite, by values between two classes
#   and by values above the last one. In Delhi fine particles of 300 µg/m³, which are severe and above
#   400, have the index 300, 40 mg/m³ of carbon monoxide the index 40, good, and 30.5 µg/m³ of fine
#   particles 30.5, below the 50 of 30 µg/m³. An hour with 0.7 ppm of ozone has an index of 0.700.
# Expected: an index above 400, or no index.
# Instead: check that the result is a Decimal and not the text that was passed.
# Source: Central Pollution Control Board, National Air Quality Index, 2014.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqicalc==0.0.8.1'
cat > expected.txt <<'EXPECTED'
epa, pm25: 30 -> 89, 500.4 -> 500, 600 -> 600
epa, o3_1h: 0.100 -> 0.100, 0.130 -> 107, 0.700 -> 0.700
cpcb, pm25: 30 -> 50, 30.5 -> 30.5, 60.7 -> 60.7, 200 -> 362, 251 -> 251, 300 -> 300
cpcb, co_8h: 17 -> 300, 40 -> 40
a day with PM2.5 of 300 and PM10 of 120 in Delhi: None
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import aqicalc

cases = (
    (aqicalc.ALGO_EPA, 'pm25', ('30', '500.4', '600')),
    (aqicalc.ALGO_EPA, 'o3_1h', ('0.100', '0.130', '0.700')),
    (aqicalc.ALGO_CPCB, 'pm25', ('30', '30.5', '60.7', '200', '251', '300')),
    (aqicalc.ALGO_CPCB, 'co_8h', ('17', '40')),
)
for algorithm, pollutant, values in cases:
    found = [f'{value} -> {aqicalc.to_iaqi(pollutant, value, algo=algorithm)}' for value in values]
    print(f'{algorithm.split(".")[-1]}, {pollutant}: {", ".join(found)}')
day = [('pm25', '300'), ('pm10', '120')]
print('a day with PM2.5 of 300 and PM10 of 120 in Delhi:', aqicalc.to_aqi(day, algo=aqicalc.ALGO_CPCB))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

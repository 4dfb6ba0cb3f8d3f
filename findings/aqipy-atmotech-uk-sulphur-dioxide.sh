#!/usr/bin/env bash
# The British air quality index of aqipy-atmotech looks sulphur dioxide up in the table of nitrogen
# dioxide.
#
# Packages: aqipy-atmotech 0.1.5.
# Behaviour: daqi_uk has a table for each pollutant, and get_daqi_so2_15m passes the one of nitrogen
#   dioxide; UK_SO2_15M is not used. 34 ppb, the first value of class 2, is in class 1, and 330 ppb are
#   in class 10, very high, in place of 8, high, where the advice changes from reducing exertion to
#   avoiding it for people with asthma.
# Expected: UK_SO2_15M, which agrees with the published limits.
# Instead: look the value up in UK_SO2_15M.
# Source: Defra, Update on Implementation of the Daily Air Quality Index, 2013.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqipy-atmotech==0.1.5'
cat > expected.txt <<'EXPECTED'
34 ppb of sulphur dioxide, 90 µg/m³: index 1, as nitrogen dioxide 1; by its own table 2, by the published limits 2
70 ppb of sulphur dioxide, 186 µg/m³: index 2, as nitrogen dioxide 2; by its own table 3, by the published limits 3
110 ppb of sulphur dioxide, 293 µg/m³: index 4, as nitrogen dioxide 4; by its own table 4, by the published limits 4
210 ppb of sulphur dioxide, 559 µg/m³: index 6, as nitrogen dioxide 6; by its own table 7, by the published limits 7
260 ppb of sulphur dioxide, 692 µg/m³: index 8, as nitrogen dioxide 8; by its own table 7, by the published limits 7
330 ppb of sulphur dioxide, 878 µg/m³: index 10, as nitrogen dioxide 10; by its own table 8, by the published limits 8
400 ppb of sulphur dioxide, 1064 µg/m³: index 10, as nitrogen dioxide 10; by its own table 9, by the published limits 9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from aqipy import daqi_uk

official = [33, 67, 101, 134, 169, 202, 270, 338, 405]
published = [88, 177, 266, 354, 443, 532, 710, 887, 1064]

for ppb in (34, 70, 110, 210, 260, 330, 400):
    index, _, ill = daqi_uk.get_daqi_so2_15m(ppb / 1000)
    as_dioxide = daqi_uk.get_daqi_no2_1h(ppb / 1000)[0]
    own = next(place for place, (low, high) in enumerate(daqi_uk.UK_SO2_15M, 1) if low <= ppb <= high or place == 10)
    micrograms = ppb * 2.66
    right = 1 + sum(micrograms > limit for limit in published)
    print(f'{ppb} ppb of sulphur dioxide, {micrograms:.0f} µg/m³: index {index}, as nitrogen dioxide {as_dioxide};',
          f'by its own table {own}, by the published limits {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

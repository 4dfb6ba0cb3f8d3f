#!/usr/bin/env bash
# aqi-hub leaves ozone out of the American air quality index where it is given in the documented unit.
#
# Packages: aqi-hub 0.3.3.
# Behaviour: the class AQI of aqi_usa documents ozone in ppb, and POLLUTANT_UNITS too. It is compared
#   with limits in ppm: 90 ppb are 90 ppm, above the last class, for which the function warns and
#   returns None, and the index is the maximum of the others. A day with 90 ppb of ozone, unhealthy,
#   has an index of 27, good. Nitrogen dioxide has an index of 500 from 1249 ppb on, where the last
#   class, from 1250 to 2049 ppb, begins at 301.
# Expected: ozone in ppb, as it is documented.
# Instead: pass ozone in ppm, as the function cal_aqi_usa documents it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqi-hub==0.3.3'
cat > expected.txt <<'EXPECTED'
documented for AQI: [('o3_8h', 'ppb'), ('o3_1h', 'ppb')]
ozone of 30 ppb: as documented index 27, of ozone None; as 0.03 ppm index 27, of ozone 27
ozone of 60 ppb: as documented index 27, of ozone None; as 0.06 ppm index 69, of ozone 69
ozone of 90 ppb: as documented index 27, of ozone None; as 0.09 ppm index 161, of ozone 161
ozone of 150 ppb: as documented index 27, of ozone None; as 0.15 ppm index 247, of ozone 247
nitrogen dioxide of 1240 ppb: index 298
nitrogen dioxide of 1249 ppb: index 500
nitrogen dioxide of 1250 ppb: index 500
nitrogen dioxide of 1500 ppb: index 500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import re
import warnings

from aqi_hub import aqi_usa

warnings.simplefilter('ignore')
print('documented for AQI:', re.findall(r'(o3_\dh): O3浓度, 单位: (\w+)', aqi_usa.AQI.__doc__))
for ppb in (30, 60, 90, 150):
    documented = aqi_usa.AQI(5, 10, 5, 10, 0.5, ppb)
    parts = aqi_usa.AQI(5, 10, 5, 10, 0.5, ppb / 1000)
    print(f'ozone of {ppb} ppb: as documented index {documented.AQI}, of ozone {documented.IAQI["O3"]};',
          f'as {ppb / 1000} ppm index {parts.AQI}, of ozone {parts.IAQI["O3"]}')
for ppb in (1240, 1249, 1250, 1500):
    print(f'nitrogen dioxide of {ppb} ppb: index {aqi_usa.cal_iaqi_usa(ppb, "NO2_1H")}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

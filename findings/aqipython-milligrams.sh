#!/usr/bin/env bash
# AQIPython converts milligrams as if they were parts per million: fine particles in milligrams are
# always good.
#
# Packages: AQIPython 1.0.1.
# Behaviour: calculate_aqi passes mg/m3 to the conversion of ppm. A gas is multiplied by its own factor,
#   1881 for nitrogen dioxide and 2619 for sulphur dioxide, in place of 1000, and particles by none, so
#   that 0.045 mg/m³ of PM2.5 are 0.045 µg/m³. Its mgTOug, which multiplies by 1000, is not used.
# Expected: the same index in both units.
# Instead: multiply by 1000 and pass ug/m3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'AQIPython==1.0.1'
cat > expected.txt <<'EXPECTED'
NO2, 60 µg/m³: index 67.3; the same as 0.06 mg/m³: 133.5
SO2, 60 µg/m³: index 75.5; the same as 0.06 mg/m³: 126.5
CO, 1500 µg/m³: index 75.5; the same as 1.5 mg/m³: 86.2
PM25, 45 µg/m³: index 75.5; the same as 0.045 mg/m³: 0.1
PM10, 90 µg/m³: index 90.2; the same as 0.09 mg/m³: 0.1
O3, 70 µg/m³: index 70.6; the same as 0.07 mg/m³: 155.4
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from AQIPython import calculate_aqi

for pollutant, micrograms in (('NO2', 60), ('SO2', 60), ('CO', 1500), ('PM25', 45), ('PM10', 90), ('O3', 70)):
    milligrams = micrograms / 1000
    print(f'{pollutant}, {micrograms} µg/m³: index {calculate_aqi("IN", pollutant, micrograms):.1f};',
          f'the same as {milligrams} mg/m³: {calculate_aqi("IN", pollutant, milligrams, unit="mg/m3"):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

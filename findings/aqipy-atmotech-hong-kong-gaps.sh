#!/usr/bin/env bash
# The air quality health index of Hong Kong in aqipy-atmotech is 11, serious, for each hour whose added
# risk is between two of its classes.
#
# Packages: aqipy-atmotech 0.1.5.
# Behaviour: the classes of the added risk end at 1.87, 5.63 or 9.40 and begin at 1.88, 5.64 and 9.41.
#   get_aqhi starts with 11 and changes it where the risk, which is not rounded, is within a class. As
#   ozone rises, the index goes from 3 to 11 and then to 4, and so on at each step. Sulphur dioxide of 0
#   counts as 20 ppb, the module says as a normal level, so that clean air has a higher index than air
#   with 1 ppb.
# Expected: an index that does not fall where a pollutant rises.
# Instead: compute the added risk and compare it with the upper ends of the classes.
# Source: Environmental Protection Department of Hong Kong, A Study to Review Hong Kong's Air Pollution
#   Index Reporting System, 2012.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqipy-atmotech==0.1.5'
cat > expected.txt <<'EXPECTED'
ozone from 0.00 ppb on: index 2, low
ozone from 13.87 ppb on: index 3, low
ozone from 31.72 ppb on: index 11, serious
ozone from 31.82 ppb on: index 4, moderate
ozone from 49.35 ppb on: index 11, serious
ozone from 49.44 ppb on: index 5, moderate
ozone from 66.75 ppb on: index 11, serious
ozone from 66.85 ppb on: index 6, moderate
ozone from 83.77 ppb on: index 11, serious
ozone from 83.86 ppb on: index 7, high
ozone from 98.19 ppb on: index 11, serious
ozone from 98.28 ppb on: index 8, very high
ozone from 117.10 ppb on: index 11, serious
ozone from 117.18 ppb on: index 9, very high
ozone 20 ppb and sulphur dioxide of 0, 1 and 2 ppb: indices [3, 2, 2]
ozone 40 ppb and sulphur dioxide of 0, 1 and 2 ppb: indices [4, 3, 3]
ozone 55 ppb and sulphur dioxide of 0, 1 and 2 ppb: indices [5, 4, 4]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from aqipy import aqhi_hk

before = None
for step in range(12000):
    ozone = step / 100
    index = aqhi_hk.get_aqhi(ozone / 1000, 0.02, 0.002, 0, 20)[0]
    if index != before:
        level = aqhi_hk.get_aqhi(ozone / 1000, 0.02, 0.002, 0, 20, with_level=True)[1]['level']
        print(f'ozone from {ozone:.2f} ppb on: index {index}, {level}')
    before = index
for ozone in (20, 40, 55):
    found = [aqhi_hk.get_aqhi(ozone / 1000, 0.01, sulphur / 1000, 0, 10)[0] for sulphur in (0, 1, 2)]
    print(f'ozone {ozone} ppb and sulphur dioxide of 0, 1 and 2 ppb: indices {found}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

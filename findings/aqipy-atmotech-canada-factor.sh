#!/usr/bin/env bash
# The Canadian Air Quality Health Index of aqipy-atmotech lacks the factor that makes an index of the
# added risk.
#
# Packages: aqipy-atmotech 0.1.5.
# Behaviour: aqhi_ca names its source, in which the index is 10 / 10.4 times the added risk of ozone,
#   nitrogen dioxide and fine particles in per cent. It returns the risk itself, rounded. All values
#   are 4 % too large, so that some low ones are moderate and some moderate ones high, for which
#   people with a heart or lung disease get other advice.
# Expected: the formula of its source.
# Instead: multiply by 10 / 10.4 before rounding.
# Source: Stieb et al., A New Multipollutant, No-Threshold Air Quality Health Index Based on
#   Short-Term Associations Observed in Daily Time-Series Analyses, 2008.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqipy-atmotech==0.1.5'
cat > expected.txt <<'EXPECTED'
ozone 25 ppb, NO2 20 ppb, PM2.5 10: added risk 3.60 %, index 4, moderate; by the formula 3.46, low
ozone 40 ppb, NO2 10 ppb, PM2.5 10: added risk 3.53 %, index 4, moderate; by the formula 3.40, low
ozone 30 ppb, NO2 30 ppb, PM2.5 10: added risk 4.76 %, index 5, moderate; by the formula 4.58, moderate
ozone 30 ppb, NO2 35 ppb, PM2.5 40: added risk 6.69 %, index 7, high; by the formula 6.43, moderate
ozone 45 ppb, NO2 30 ppb, PM2.5 30: added risk 6.57 %, index 7, high; by the formula 6.31, moderate
ozone 40 ppb, NO2 40 ppb, PM2.5 60: added risk 8.68 %, index 9, high; by the formula 8.35, high
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import exp

from aqipy import aqhi_ca

for ozone, dioxide, particles in ((25, 20, 10), (40, 10, 10), (30, 30, 10), (30, 35, 40), (45, 30, 30), (40, 40, 60)):
    index = aqhi_ca.get_aqhi(ozone / 1000, dioxide / 1000, particles, 0)[0]
    level = aqhi_ca.get_aqhi(ozone / 1000, dioxide / 1000, particles, 0, with_level=True)[1]['level']
    risk = (exp(0.000537 * ozone) - 1) + (exp(0.000871 * dioxide) - 1) + (exp(0.000487 * particles) - 1)
    right = 1000 / 10.4 * risk
    name = 'low' if round(right) < 4 else 'moderate' if round(right) < 7 else 'high'
    print(f'ozone {ozone} ppb, NO2 {dioxide} ppb, PM2.5 {particles}: added risk {100 * risk:.2f} %, index {index}, {level};',
          f'by the formula {right:.2f}, {name}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# devind-yearfrac counts 28 February as the 30th in leap years as well.
#
# Packages: devind-yearfrac 1.0.0, numpy 1.26.4.
# Behaviour: yearfrac with 30e360 sets each 28 and 29 February to the 30th. 30E/360 only sets the
#   31st to the 30th; its variant of ISDA also sets the last day of February, which the 28th is not
#   in a leap year. From 28 January to 28 February 2024 it counts 32 days, from 28 February to 28
#   March 28, and from 28 to 29 February 0.
# Expected: 30, 30 and 1 days, or 2 for the last one in the variant of ISDA.
# Instead: 30 (m2 - m1) + min(d2, 30) - min(d1, 30), or QuantLib.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'devind-yearfrac==1.0.0' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
2024-01-28 to 2024-02-28: 32 days, 30E/360 30, of ISDA 30
2024-02-28 to 2024-03-28: 28 days, 30E/360 30, of ISDA 30
2024-02-28 to 2024-02-29: 0 days, 30E/360 1, of ISDA 2
2023-01-28 to 2023-02-28: 32 days, 30E/360 30, of ISDA 32
2023-08-28 to 2024-02-28: 182 days, 30E/360 180, of ISDA 180
2024-01-27 to 2024-02-27: 30 days, 30E/360 30, of ISDA 30
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime

from devind_yearfrac import yearfrac

def by_hand(start, end, isda):
    days = []
    for day in (start, end):
        last = isda and day.month == 2 and day.day == (29 if day.year % 4 == 0 else 28)
        days.append(30 if last else min(day.day, 30))
    return 360 * (end.year - start.year) + 30 * (end.month - start.month) + days[1] - days[0]

pairs = (
    ('2024-01-28', '2024-02-28'), ('2024-02-28', '2024-03-28'), ('2024-02-28', '2024-02-29'),
    ('2023-01-28', '2023-02-28'), ('2023-08-28', '2024-02-28'), ('2024-01-27', '2024-02-27'),
)
for first, second in pairs:
    start, end = datetime.fromisoformat(first), datetime.fromisoformat(second)
    print(f'{first} to {second}: {360 * yearfrac(start, end, "30e360"):.0f} days,',
          f'30E/360 {by_hand(start, end, False)}, of ISDA {by_hand(start, end, True)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

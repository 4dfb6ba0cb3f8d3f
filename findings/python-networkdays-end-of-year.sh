#!/usr/bin/env bash
# The workdays of python-networkdays without an end reach a year ahead, where it documents the end of the year.
#
# Packages: python-networkdays 1.2.
# Behaviour: Networkdays documents date_end as "end date, or if none, is the last day of the date_start
#   year". The code takes the same day of the next year: from 1 October 2025 it lists the days to 1 October
#   2026, 262 rather than 66.
# Expected: the workdays to 31 December.
# Instead: pass the last day of the year.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-networkdays==1.2'
cat > expected.txt <<'EXPECTED'
date_end (datetime.date): end date, or if none, is the last day of the date_start year.
from 2025-01-01: 262 workdays to 2026-01-01; to the end of the year 261 to 2025-12-31
from 2025-10-01: 262 workdays to 2026-10-01; to the end of the year 66 to 2025-12-31
from 2025-12-29: 262 workdays to 2026-12-29; to the end of the year 3 to 2025-12-31
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from networkdays.networkdays import Networkdays

print(*[line.strip() for line in Networkdays.networkdays.__doc__.splitlines()
        if 'if none' in line or 'date_start year' in line])
for start in (date(2025, 1, 1), date(2025, 10, 1), date(2025, 12, 29)):
    seen = Networkdays(start).networkdays()
    day, hand = start, []
    while day.year == start.year:
        hand += [day] if day.weekday() < 5 else []
        day += timedelta(1)
    print(f'from {start}: {len(seen)} workdays to {seen[-1]}; to the end of the year {len(hand)} to {hand[-1]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The number of holidays between two days depends on their order in bizdatim.
#
# Packages: bizdatim 0.2.0.
# Behaviour: Policy.holidays_between(day1, day2, skip_weekends=False) counts the holidays on weekends as well.
#   Where day1 is the later one, it calls itself with the days in order and without skip_weekends, and the
#   holidays on weekends are left out.
# Expected: the same number in both orders, as without skip_weekends.
# Instead: pass the earlier day first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bizdatim==0.2.0'
cat > expected.txt <<'EXPECTED'
skip_weekends=True: 3 in order, 3 in reverse; by hand 3
skip_weekends=False: 5 in order, 3 in reverse; by hand 5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from bizdatim import SAT, SUN, Policy

holidays = [date(2026, 4, 3), date(2026, 4, 5), date(2026, 4, 6), date(2026, 5, 1), date(2026, 5, 9)]
policy = Policy(weekends=(SAT, SUN), holidays=holidays)
first, last = date(2026, 4, 1), date(2026, 5, 15)
for skip in (True, False):
    hand = sum(first < day < last and not (skip and day.weekday() >= 5) for day in holidays)
    print(f'skip_weekends={skip}: {policy.holidays_between(first, last, skip_weekends=skip)} in order,',
          f'{policy.holidays_between(last, first, skip_weekends=skip)} in reverse; by hand {hand}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

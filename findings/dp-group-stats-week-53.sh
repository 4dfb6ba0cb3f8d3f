#!/usr/bin/env bash
# dp-group-stats puts the last week of a year with 53 weeks into a fortnight that ended before it, and
# leaves it out of the annual privacy budget.
#
# Packages: dp-group-stats 0.1.2.
# Behaviour: get_period_bounds returns the period that contains a date. For the fortnights of week 53 it
#   returns weeks 51 and 52, so 28 December 2026 to 3 January 2027 lie in no period: rows that are
#   selected by its bounds are lost, and a release that is recorded for them is the second one of the
#   fortnight before. Weekly releases are counted as 52 a year, so a limit of 52 is accepted for 53.
# Expected: a period that contains the date, and 53 weeks for 2020, 2026 and 2032.
# Why it matters here: an account that forgets a release states an ε that is too small.
# Instead: periods of 14 days from a fixed Monday, or months, which are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dp-group-stats==0.1.2'
cat > expected.txt <<'EXPECTED'
2026-12-20, week 51: fortnight 25 from 2026-12-14 to 2026-12-27, which contains it
2026-12-30, week 53: fortnight 26 from 2026-12-14 to 2026-12-27, which does not contain it
2027-01-02, week 53: fortnight 26 from 2026-12-14 to 2026-12-27, which does not contain it
2027-01-06, week 1: fortnight 0 from 2027-01-04 to 2027-01-17, which contains it
2019: 0 days in no fortnight
2020: 4 days in no fortnight
2025: 0 days in no fortnight
2026: 4 days in no fortnight
a limit of 52 for 2026 is accepted, and its 53 weekly releases cost 53
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from dp_group_stats import (
    DPGroupStatsConfig, EpsilonSplit, compute_period_index, get_period_bounds,
)

for day in (date(2026, 12, 20), date(2026, 12, 30), date(2027, 1, 2), date(2027, 1, 6)):
    start, end = get_period_bounds(day, 'biweekly')
    print(f'{day}, week {day.isocalendar().week}: fortnight {compute_period_index(day, "biweekly")} from',
          f'{start} to {end}, which {"contains" if start <= day <= end else "does not contain"} it')
for year in (2019, 2020, 2025, 2026):
    days = [date(year, 1, 1) + timedelta(days=count) for count in range(366)]
    days = [day for day in days if day.year == year]
    lost = 0
    for day in days:
        start, end = get_period_bounds(day, 'biweekly')
        lost += not start <= day <= end
    print(f'{year}: {lost} days in no fortnight')
split = EpsilonSplit(planned_sum=0.5, actual_sum=0.5)
config = DPGroupStatsConfig(epsilon_split=split, annual_epsilon_cap=52, period_type='weekly')
weeks = date(2026, 12, 28).isocalendar().week
print(f'a limit of {config.annual_epsilon_cap} for 2026 is accepted, and its {weeks} weekly releases cost',
      f'{weeks * split.total:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

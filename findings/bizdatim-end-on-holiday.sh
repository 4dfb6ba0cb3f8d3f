#!/usr/bin/env bash
# bizdatim adds a business day too few where the days end on the second of two holidays.
#
# Packages: bizdatim 0.2.0.
# Behaviour: Policy.add counts the holidays between the start and the day that it reaches, without the latter,
#   and adds as many days. Where the day reached is a holiday too, it is left without replacement. With
#   holidays on 25 and 26 December, one and two business days after 24 December are both 29 December.
# Expected: 29 and 30 December.
# Instead: add the days one at a time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bizdatim==0.2.0'
cat > expected.txt <<'EXPECTED'
1 holidays, 1 to 4 days after 2025-12-24: 26.12. 29.12. 30.12. 31.12. ; one at a time 26.12. 29.12. 30.12. 31.12. ; by hand 26.12. 29.12. 30.12. 31.12.
2 holidays, 1 to 4 days after 2025-12-24: 29.12. 29.12. 31.12. 01.01. ; one at a time 29.12. 30.12. 31.12. 01.01. ; by hand 29.12. 30.12. 31.12. 01.01.
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from bizdatim import SAT, SUN, Policy

for holidays in ([date(2025, 12, 25)], [date(2025, 12, 25), date(2025, 12, 26)]):
    policy = Policy(weekends=(SAT, SUN), holidays=holidays)
    start = date(2025, 12, 24)
    seen = [policy.add(start, days) for days in range(1, 5)]
    hand, day = [], start
    while len(hand) < 4:
        day += timedelta(1)
        if day.weekday() < 5 and day not in holidays:
            hand.append(day)
    single, steps = start, []
    for _ in range(4):
        single = policy.add(single, 1)
        steps.append(single)
    print(f'{len(holidays)} holidays, 1 to 4 days after {start}:', *[f'{day:%d.%m.}' for day in seen],
          '; one at a time', *[f'{day:%d.%m.}' for day in steps], '; by hand', *[f'{day:%d.%m.}' for day in hand])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

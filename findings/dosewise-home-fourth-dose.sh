#!/usr/bin/env bash
# dosewise-home plans three doses a day for a medicine with four, five or six: the list of its times ends with three.
#
# Packages: dosewise-home 0.1.0.
# Behaviour: without a word for the time in the instructions, default_slots gives 8:00, 14:00 and 21:00 for three doses and
#   more. The days left are computed with the number of the row, so that plan and refill of one row contradict each other.
# Expected: as many times as doses_per_day says, as for one, two and three.
# Why it matters here: penicillin V, aciclovir (five times a day) and eye drops after surgery are given that often. The
#   household follows a list with one, two or three doses too few and sees no warning.
# Instead: check that the plan has as many items as doses_per_day.
# Source: the column doses_per_day, which the package documents as required.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dosewise-home==0.1.0'
cat > expected.txt <<'EXPECTED'
Lisinopril, 1 a day: 1 planned, at 09:00; 60 last 60.0 days, as planned 60.0
Metformin, 2 a day: 2 planned, at 08:00 20:00; 60 last 30.0 days, as planned 30.0
Amoxicillin, 3 a day: 3 planned, at 08:00 14:00 21:00; 60 last 20.0 days, as planned 20.0
Penicillin V, 4 a day: 3 planned, at 08:00 14:00 21:00; 60 last 15.0 days, as planned 20.0
Aciclovir, 5 a day: 3 planned, at 08:00 14:00 21:00; 60 last 12.0 days, as planned 20.0
Eye drops, 6 a day: 3 planned, at 08:00 14:00 21:00; 60 last 10.0 days, as planned 20.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date
from dosewise_home.planner import build_plan

for name, doses in (('Lisinopril', 1), ('Metformin', 2), ('Amoxicillin', 3), ('Penicillin V', 4), ('Aciclovir', 5), ('Eye drops', 6)):
    plan = build_plan(f'name,owner,strength,instructions,quantity_left,doses_per_day\n{name},Sam,1,Take as prescribed,60,{doses}\n',
                      today=date(2026, 7, 1))
    print(f'{name}, {doses} a day: {len(plan["schedule"])} planned, at {" ".join(item["time"] for item in plan["schedule"])}; '
          f'60 last {plan["refills"][0]["days_left"]} days, as planned {60 / len(plan["schedule"]):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

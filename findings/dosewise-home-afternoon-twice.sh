#!/usr/bin/env bash
# dosewise-home plans each dose of the afternoon twice, at 12:00 and at 15:00, since the word "noon" is in "afternoon".
#
# Packages: dosewise-home 0.1.0.
# Behaviour: infer_schedule looks for words like morning, noon, afternoon and night anywhere in the instructions and the
#   notes, as parts of words too, and plans a dose for each that it finds. doses_per_day counts only if no word is found.
#   "Fortnightly" and "overnight" are doses at 21:30 in the same way.
# Expected: one time, 15:00, for "take one tablet in the afternoon" with doses_per_day 1, and for an injection once a
#   fortnight no dose at 21:30 on each day because of this word.
# Why it matters here: the plan tells somebody in the household to take twice what is prescribed.
# Instead: write "at 3 pm" with a column of your own, or compare the number of the items with doses_per_day.
# Source: the column doses_per_day of the same row, and the package: "a daily dose timeline".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dosewise-home==0.1.0'
cat > expected.txt <<'EXPECTED'
Take one tablet in the morning, 1 dose a day: planned at ['08:00']
Take one tablet in the afternoon, 1 dose a day: planned at ['12:00', '15:00']
Take one tablet at noon, 1 dose a day: planned at ['12:00']
Take every evening, 1 dose a day: planned at ['18:00']
Inject fortnightly at breakfast, 1 dose a day: planned at ['08:00', '21:30']
Take at breakfast after an overnight fast, 1 dose a day: planned at ['08:00', '21:30']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from dosewise_home.planner import build_plan

for text in ('Take one tablet in the morning', 'Take one tablet in the afternoon', 'Take one tablet at noon',
             'Take every evening', 'Inject fortnightly at breakfast', 'Take at breakfast after an overnight fast'):
    plan = build_plan(f'name,owner,strength,instructions,quantity_left,doses_per_day\nX,Sam,20mg,{text},30,1\n')
    print(f'{text}, 1 dose a day: planned at {[item["time"] for item in plan["schedule"]]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

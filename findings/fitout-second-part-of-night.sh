#!/usr/bin/env bash
# fitout joins two parts of a night and forgets the sleep of the second one: its time in bed and its stages are added and its
# minutes asleep are not.
#
# Packages: fitout 0.3.1.
# Behaviour: get_data of BasicSleepInfo makes one row of all the entries of a night. Awake, in bed, deep, light, REM and the
#   end are those of both parts. minutesAsleep and efficiency stay those of the first part.
# Expected: 380 minutes asleep, the sum of the three stages in the same row, and an efficiency of the whole night.
# Why it matters here: who gets up at four and sleeps again until eight has slept three hours and 40 minutes in the table.
#   The nights with an interruption are the ones of interest.
# Instead: take the sum of deep, light and REM, or get_raw_sessions.
# Source: the sum of minutesAsleep of the two entries; asleep and awake are the time in bed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fitout==0.3.1'
cat > expected.txt <<'EXPECTED'
one part: in bed 240, deep, light and REM together 220, asleep 220 (true 220), awake 20, efficiency 92
two parts: in bed 420, deep, light and REM together 380, asleep 220 (true 380), awake 100, efficiency 92
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import json
from contextlib import redirect_stdout
from datetime import date
from io import StringIO
from pathlib import Path
from fitout import BasicSleepInfo, NativeFileLoader

FOLDER = Path('Takeout/Fitbit/Global Export Data')
FOLDER.mkdir(parents=True)


def part(start, end, bed, asleep, deep, light, rem, main):
    levels = {'deep': deep, 'light': light, 'rem': rem, 'wake': bed - asleep}
    return {'dateOfSleep': '2024-03-21', 'startTime': f'2024-03-21T{start}:00.000', 'endTime': f'2024-03-21T{end}:00.000',
            'minutesToFallAsleep': 0, 'minutesAsleep': asleep, 'minutesAwake': bed - asleep, 'minutesAfterWakeup': 0,
            'timeInBed': bed, 'efficiency': round(100 * asleep / bed), 'mainSleep': main,
            'levels': {'summary': {key: {'minutes': value} for key, value in levels.items()}}}


first, second = part('00:00', '04:00', 240, 220, 40, 130, 50, True), part('05:00', '08:00', 180, 160, 20, 100, 40, False)


def night(*parts):
    (FOLDER / 'sleep-2024-03-02.json').write_text(json.dumps(list(reversed(parts))))
    with redirect_stdout(StringIO()):
        data = BasicSleepInfo(NativeFileLoader('./')).get_data(date(2024, 3, 21), date(2024, 3, 21))
    return {key: values[0] for key, values in data.items()}


for name, seen, expected in (('one part', night(first), 220), ('two parts', night(first, second), 380)):
    stages = sum(seen[f'summary_{key}_mins'] for key in ('deep', 'light', 'rem'))
    print(f'{name}: in bed {seen["timeInBed"]}, deep, light and REM together {stages}, asleep {seen["minutesAsleep"]} '
          f'(true {expected}), awake {seen["minutesAwake"]}, efficiency {seen["efficiency"]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

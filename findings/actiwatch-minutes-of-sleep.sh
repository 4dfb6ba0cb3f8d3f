#!/usr/bin/env bash
# actiwatch removes six minutes of sleep between long times awake and keeps five: the rules of Webster and Cole for "ten
# minutes or less" are applied to exactly ten.
#
# Packages: actiwatch 0.2.0, pandas 3.1.1, numpy 2.4.6.
# Behaviour: smooth_sleep scores short sleep again as awake, by rules that the function cole_post_process is named after.
#   It does so for bouts of exactly 1, 3, 4, 6 and 10 minutes. Between 25 minutes awake on both sides 2, 5, 7, 8 and 9
#   minutes stay sleep.
# Expected: all bouts of up to 10 minutes become awake there, and all of up to 6 minutes where the times awake are 10
#   minutes or more.
# Why it matters here: the rules exist since lying still is not sleep. The sleep of a night depends on whether somebody lay
#   still for nine or for ten minutes, in the wrong direction.
# Instead: compare with <= in a copy of the function, for the rules about minutes "or less".
# Source: Webster and others, An activity-based sleep monitor system for ambulatory use, Sleep 5 (1982), also in Cole and
#   others, Sleep 15 (1992): 6 minutes or less scored as sleep, surrounded by at least 10 minutes awake, and 10 minutes or
#   less, surrounded by at least 20, are rescored as awake.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==3.1.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'actiwatch==0.2.0'
cat > expected.txt <<'EXPECTED'
between 25 minutes awake, sleep that becomes awake: [1, 3, 4, 6, 10] minutes, by the rule 1 to 10; that stays: [2, 5, 7, 8, 9, 11]
between 12 minutes awake, sleep that becomes awake: [1, 3, 6] minutes, by the rule 1 to 6; that stays: [2, 4, 5, 7, 8, 9, 10, 11]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from actiwatch.sleep_processing import smooth_sleep

for awake, limit in ((25, 10), (12, 6)):
    left = {}
    for minutes in range(1, 12):
        night = ['Wake'] * awake + ['Sleep'] * minutes + ['Wake'] * awake
        left[minutes] = smooth_sleep(night, 60).count('Sleep')
    print(f'between {awake} minutes awake, sleep that becomes awake: {[key for key, value in left.items() if value == 0]} minutes,',
          f'by the rule 1 to {limit}; that stays: {[key for key, value in left.items() if value]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The grades of hearing that audiogram calls WHO 2021 are not the ones of WHO 2021: a loss of 38 dB is mild in place of
# moderate, one of 22 dB normal in place of mild, and complete loss does not exist.
#
# Packages: audiogram 0.1.0.
# Behaviour: severity_from_pta, the default standard who2021 of severity, has its limits at 25, 40, 55, 70 and 90 dB.
#   These are older limits. The World Report on Hearing of 2021 moved the first one to 20 dB and made all grades 15 dB wide.
# Expected: the limits that the name states, or another name.
# Why it matters here: the share of people with a hearing loss is the number that such a table is made for, and the grade
#   decides who is offered a hearing aid.
# Instead: grade ear.pta(standard="4tone") by the limits of this script.
# Source: World Health Organization, World report on hearing, 2021, table 1.3: normal below 20 dB, mild 20 to 35, moderate
#   35 to 50, moderately severe 50 to 65, severe 65 to 80, profound 80 to 95, complete 95 and more, mean of 500, 1000, 2000
#   and 4000 Hz in the better ear.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'audiogram==0.1.0'
cat > expected.txt <<'EXPECTED'
15 dB: audiogram normal, WHO 2021 normal
22 dB: audiogram normal, WHO 2021 mild
30 dB: audiogram mild, WHO 2021 mild
38 dB: audiogram mild, WHO 2021 moderate
52 dB: audiogram moderate, WHO 2021 moderately severe
68 dB: audiogram moderately severe, WHO 2021 severe
85 dB: audiogram severe, WHO 2021 profound
100 dB: audiogram profound, WHO 2021 complete
other grades for 61 of 121 losses from 0 to 120 dB
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from audiogram import EarAudiogram

limits = [(20, 'normal'), (35, 'mild'), (50, 'moderate'), (65, 'moderately severe'), (80, 'severe'), (95, 'profound')]

def grade(loss):
    return next((name for limit, name in limits if loss < limit), 'complete')

wrong = 0
for loss in range(0, 121):
    ear = EarAudiogram(air=dict.fromkeys((500, 1000, 2000, 4000), loss))
    seen = ear.severity(standard='who2021').replace('_', ' ')
    wrong += seen != grade(loss)
    if loss in (15, 22, 30, 38, 52, 68, 85, 100):
        print(f'{loss} dB: audiogram {seen}, WHO 2021 {grade(loss)}')
print(f'other grades for {wrong} of 121 losses from 0 to 120 dB')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

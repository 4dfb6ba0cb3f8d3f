#!/usr/bin/env bash
# canada-holiday lists the national holidays of a province once more with each call: the tenth list of Ontario has
# Christmas ten times.
#
# Packages: canada-holiday 1.1.4.
# Behaviour: get_holidays appends the five national holidays to the list of the province in the module, and is_holiday
#   does so too. The lists grow as long as the program runs, and a report with the number of holidays of a year is
#   different each time.
# Expected: the same answer to the same question.
# Instead: keep the first answer, or drop repeated dates.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'canada-holiday==1.1.4'
cat > expected.txt <<'EXPECTED'
call 1: 11 holidays in 2024, Christmas Day 1 times
call 2: 16 holidays in 2024, Christmas Day 2 times
call 3: 21 holidays in 2024, Christmas Day 3 times
call 10: 56 holidays in 2024, Christmas Day 10 times
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from contextlib import redirect_stdout
from io import StringIO

from canada_holiday import get_holidays

for call in range(1, 11):
    with redirect_stdout(StringIO()):
        names = [holiday.name for holiday in get_holidays('Ontario', 2024)]
    if call in (1, 2, 3, 10):
        print(f'call {call}: {len(names)} holidays in 2024, Christmas Day {names.count("Christmas Day")} times')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

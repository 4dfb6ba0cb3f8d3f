#!/usr/bin/env bash
# nic-parser reads a birthday in January or February, or in a leap year, a day too early from a Sri Lankan
# identity number, and calls the numbers of everybody born on 1 January invalid.
#
# Packages: nic-parser 0.2.0.
# Behaviour: the numbers count the days of each year as if it had 366, so that 1 March is day 61. One is
#   subtracted from the day whatever the year and the day are, which is right from 1 March on in years of
#   365 days. 1 January becomes day 0 and raises a ValueError; for women, whose day is 500 larger, 501
#   becomes 500, and is not taken for the day of a woman any more.
# Expected: the days of January and February, and all days of leap years, without a shift.
# Why it matters here: a wrong birthday does not match the one of another table, and changes ages.
# Instead: date(2000, 1, 1) + timedelta(day - 1) for the month and the day, as it is done here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'nic-parser==0.2.0'
cat > expected.txt <<'EXPECTED'
1995-01-01: 199500100123 is read as ValueError: Birth date not within range., 199550100123 as ValueError: Birth date not within range.
1995-01-02: 199500200123 is read as 1995-01-01, 199550200123 as 1995-01-01
1995-02-28: 199505900123 is read as 1995-02-27, 199555900123 as 1995-02-27
1995-03-01: 199506100123 is read as 1995-03-01, 199556100123 as 1995-03-01
1995-12-31: 199536600123 is read as 1995-12-31, 199586600123 as 1995-12-31
1996-01-01: 199600100123 is read as ValueError: Birth date not within range., 199650100123 as ValueError: Birth date not within range.
1996-02-29: 199606000123 is read as 1996-02-28, 199656000123 as 1996-02-28
1996-03-01: 199606100123 is read as 1996-02-29, 199656100123 as 1996-02-29
1996-12-31: 199636600123 is read as 1996-12-30, 199686600123 as 1996-12-30
four years: 918 of 1461 birthdays are right
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from nic_parser.parser import Parser


def write(birthday, woman):
    day = (date(2000, birthday.month, birthday.day) - date(2000, 1, 1)).days + 1
    return f'{birthday.year}{day + 500 * woman:03}00123'


def read(number):
    try:
        return Parser(number).birth_date.date()
    except ValueError as error:
        return f'ValueError: {error}'


for birthday in (date(1995, 1, 1), date(1995, 1, 2), date(1995, 2, 28), date(1995, 3, 1), date(1995, 12, 31),
                 date(1996, 1, 1), date(1996, 2, 29), date(1996, 3, 1), date(1996, 12, 31)):
    man, woman = write(birthday, False), write(birthday, True)
    print(f'{birthday}: {man} is read as {read(man)}, {woman} as {read(woman)}')
days = [date(1995, 1, 1) + timedelta(number) for number in range(1461)]
right = sum(read(write(day, False)) == day for day in days)
print(f'four years: {right} of {len(days)} birthdays are right')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

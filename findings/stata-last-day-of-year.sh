#!/usr/bin/env bash
# pandas writes the last day of a year to a weekly date of Stata as the first week of the next year.
#
# Packages: pandas 3.1.1, pyreadstat 1.3.7 (reads the stored numbers), numpy 2.4.6.
# Behaviour: Stata's weekly dates (%tw) have 52 weeks a year, the last of eight days, of nine in a leap
#   year. to_stata(convert_dates={'date': 'tw'}) divides the day of the year by seven, so 31 December,
#   and 30 December of a leap year, become week 53, which is week 1 of the next year. read_stata returns
#   1 January: an event of 2019 is counted in 2020.
# Expected: week 52 of the same year, as Stata's function wofd gives it.
# Why it matters here: the last day of a year is a usual end of follow-up, and stands for unknown days.
# Instead: 'td', and weeks in Stata.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'pyreadstat==1.3.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
2019-12-24: stored 3119, that is 2019 week 52; right 3119; read back 2019-12-24
2019-12-30: stored 3119, that is 2019 week 52; right 3119; read back 2019-12-24
2019-12-31: stored 3120, that is 2020 week 1; right 3119; read back 2020-01-01
2020-12-30: stored 3172, that is 2021 week 1; right 3171; read back 2021-01-01
2020-12-31: stored 3172, that is 2021 week 1; right 3171; read back 2021-01-01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyreadstat

days = pd.to_datetime(['2019-12-24', '2019-12-30', '2019-12-31', '2020-12-30', '2020-12-31'])
table = pd.DataFrame({'day': days, 'week': days})
table.to_stata('table.dta', convert_dates={'day': 'td', 'week': 'tw'}, write_index=False)
read = pd.read_stata('table.dta')
stored = pyreadstat.read_dta('table.dta')[0]['week'].astype(int)
for day, number, week in zip(read['day'], stored, read['week']):
    right = (day.year - 1960) * 52 + min((day.day_of_year - 1) // 7, 51)
    print(f'{day.date()}: stored {number}, that is {1960 + number // 52} week {number % 52 + 1};',
          f'right {right}; read back {week.date()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

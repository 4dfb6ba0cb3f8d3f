#!/usr/bin/env bash
# The first and the second working day of a month are the same day in nthBday.
#
# Packages: nthBday 0.2.7, pandas 2.3.3, numpy 2.4.6.
# Behaviour: nth_working_day counts weekdays from the first of the month on and moves to the next
#   weekday where the last of them is in its list of Indian holidays. Holidays before it are not
#   subtracted. 2 October 2023 is a holiday in the list, so the first working day of that month is the
#   3rd, and so is the second one. The fifth is the 6th in place of the 9th, and all later ones are a
#   day too early, too.
# Expected: a later day for each later number.
# Instead: use numpy.busday_offset with the holidays.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'nthBday==0.2.7' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
holidays of October 2023 in the list: ['2023-10-02', '2023-10-15']
working day 1: 03 October, without the holidays 03 October
working day 2: 03 October, without the holidays 04 October
working day 3: 04 October, without the holidays 05 October
working day 4: 05 October, without the holidays 06 October
working day 5: 06 October, without the holidays 09 October
working day 6: 09 October, without the holidays 10 October
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import nthBday
import numpy as np
import pandas as pd

month = [day for day in nthBday.list_of_IN_holidays if day.startswith('2023-10')]
print('holidays of October 2023 in the list:', sorted(month))
weekdays = [day for day in pd.date_range('2023-10-01', '2023-10-31') if np.is_busday(day.date(), holidays=month)]
for n in range(1, 7):
    seen = pd.Timestamp(nthBday.nth_working_day(10, 2023, n))
    print(f'working day {n}: {seen:%d %B}, without the holidays {weekdays[n - 1]:%d %B}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

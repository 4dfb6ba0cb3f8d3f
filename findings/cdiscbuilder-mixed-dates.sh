#!/usr/bin/env bash
# cdiscbuilder loses dates with a time where the first of a column has none, and counts days in UTC.
#
# Packages: cdiscbuilder 2.2.0, pandas 3.1.1, polars 2.1.0, PyYAML 6.0.4, numpy 2.4.6.
# Behaviour: ISO 8601 dates of SDTM may or may not have a time. cdiscbuilder parses a column at
#   once: pandas takes the format of the first value, and what does not fit becomes missing. The
#   last dose (RFXENDTC) of a patient who was first dosed on a day without a time is that first day,
#   and the study days of events with a time are missing. A date with a time zone is moved to UTC
#   before the day is counted: half past midnight in Berlin is the day before, study day -1 in place
#   of 1, so before the treatment.
# Expected: the last of the three doses, study days of all complete dates, and the day that the date
#   states.
# Why it matters here: events before the first dose are not counted as side effects.
# Instead: cut the dates to ten characters first, or pandas.to_datetime(format='ISO8601').
# Source: CDISC SDTM Implementation Guide 3.4, section 4.4.4, Use of the Study Day Variables.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'numpy==2.4.6' 'polars==2.1.0' 'PyYAML==6.0.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cdiscbuilder==2.2.0'
cat > expected.txt <<'EXPECTED'
doses 2024-03-01 2024-03-08T08:00 2024-03-15T08:00
last dose: 2024-03-01 - without times: 2024-03-15
study days: [1, <NA>, <NA>]
without times: [1, 8, 15]
event on 2024-03-01T00:30+01:00: study day -1 of a treatment that begins on 2024-03-01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from cdiscbuilder.functions import calculate_study_day, get_last_dose_date


def last(dates):
    doses = pd.DataFrame({'USUBJID': 'A', 'EXENDTC': dates, 'EXDOSE': 5})
    return get_last_dose_date(pd.Series(['A']), {'EX': doses})[0]


mixed = ['2024-03-01', '2024-03-08T08:00', '2024-03-15T08:00']
print('doses', *mixed)
print('last dose:', last(mixed), '- without times:', last([date[:10] for date in mixed]))
start = pd.Series('2024-03-01', index=range(3))
print('study days:', calculate_study_day(pd.Series(mixed), start).tolist())
print('without times:', calculate_study_day(pd.Series([date[:10] for date in mixed]), start).tolist())
event = '2024-03-01T00:30+01:00'
print(f'event on {event}: study day', calculate_study_day(pd.Series([event]), start[:1])[0],
      'of a treatment that begins on 2024-03-01')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

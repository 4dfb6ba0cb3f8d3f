#!/usr/bin/env bash
# sdmetrics counts a made date of birth half a year away from the real one as a copy, and one a day
# away as new.
#
# Packages: sdmetrics 0.32.0, pandas 2.3.3, numpy 1.26.4.
# Behaviour: NewRowSynthesis calls two numbers a match if they differ by at most 1 % of the made
#   one. It turns dates into nanoseconds since 1970 first, so the tolerance of a date is 1 % of its
#   distance from 1970: 200 days in 2025, 70 days in 1950, and nothing in 1970. Numbers near 0 have
#   the same fault.
# Expected: one tolerance for all dates, in days, or for the range of the column.
# Why it matters here: the score is read as a share of rows that copy nobody. A generator that
#   shifts each date by a day has 0 new rows of patients born in 1950 or 1990, and only new ones of
#   those born in 1970.
# Instead: columns of days since a date of your own, or the age, and a comparison with a table that
#   the generator has not seen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'sdmetrics==0.32.0' 'pandas==2.3.3' 'numpy==1.26.4' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
2025-06-01, made: 1 days later a match, 30 days later a match, 60 days later a match, 200 days later a match
1990-06-01, made: 1 days later a match, 30 days later a match, 60 days later a match, 200 days later new
1970-01-02, made: 1 days later new, 30 days later new, 60 days later new, 200 days later new
1969-06-01, made: 1 days later a match, 30 days later new, 60 days later new, 200 days later new
1950-06-01, made: 1 days later a match, 30 days later a match, 60 days later a match, 200 days later new
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from sdmetrics.single_table import NewRowSynthesis

metadata = {'columns': {'birth': {'sdtype': 'datetime'}}}


def is_new(real, days):
    real = pd.DataFrame({'birth': pd.to_datetime([real])})
    made = real + pd.Timedelta(days=days)
    return bool(NewRowSynthesis.compute(real, made, metadata))


for real in ('2025-06-01', '1990-06-01', '1970-01-02', '1969-06-01', '1950-06-01'):
    print(f'{real}, made:', ', '.join(
        f'{days} days later {"new" if is_new(real, days) else "a match"}' for days in (1, 30, 60, 200)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

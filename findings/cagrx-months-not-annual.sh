#!/usr/bin/env bash
# cagrx does not annualise returns over months.
#
# Packages: cagrx 0.2.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: calculate_rolling_returns says that each return is annualised, so that windows of
#   different lengths can be compared. The length is taken from the years of the offset, and is one
#   year for DateOffset(months=6) or weeks. A fund that grows by exactly 21 % a year has average
#   rolling returns of 10 % for six months, 21 % for twelve, and 33 % for eighteen.
# Expected: about 21 % for each window.
# Instead: give whole years, or take (1 + return) ** (12 / months) - 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cagrx==0.2.0' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
6 months: 10.0% "annualised", by hand 21.0%, over the whole window 10.0%
12 months: 21.0% "annualised", by hand 21.0%, over the whole window 21.0%
18 months: 33.1% "annualised", by hand 21.0%, over the whole window 33.1%
24 months: 46.4% "annualised", by hand 21.0%, over the whole window 46.4%
2 years: 21.0% "annualised", by hand 21.0%, over the whole window 46.4%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from cagrx.return_metrics import calculate_rolling_returns

days = pd.date_range('2020-01-01', '2024-01-01', freq='D', name='date')
fund = pd.DataFrame({'nav': 100 * 1.21 ** ((days - days[0]).days / 365.25)}, index=days)
for name, period, years in (
    ('6 months', pd.DateOffset(months=6), 0.5), ('12 months', pd.DateOffset(months=12), 1),
    ('18 months', pd.DateOffset(months=18), 1.5), ('24 months', pd.DateOffset(months=24), 2),
    ('2 years', pd.DateOffset(years=2), 2),
):
    result = calculate_rolling_returns(fund, period=period)['avg_return']
    print(f'{name}: {result:.1%} "annualised", by hand 21.0%, over the whole window {1.21 ** years - 1:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# real-return-deflator pairs the returns of one month with the depreciation of another.
#
# Packages: real-return-deflator 0.1.0, pandas 2.3.3, numpy 2.2.6.
# Behaviour: deflate_series takes lists, arrays or Series of the same length. The depreciation that its own
#   exchange_rate_to_depreciation computes is numbered from 1, a list from 0. A list of returns with that
#   depreciation is matched by the numbers: the second return meets the first depreciation, and so on, and
#   the result has one row more, the first and the last empty. With dates as labels all rows are empty.
# Expected: the first return with the first depreciation, as two lists of the same numbers give, and labels
#   from 0 as documented; or the error that two Series with different labels raise.
# Instead: pass the depreciation as a list or an array.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'real-return-deflator==0.1.0' 'pandas==2.3.3' 'numpy==2.2.6'
cat > expected.txt <<'EXPECTED'
by hand: 0.0000 0.0909 0.0000
two lists: 0: 0.0000 1: 0.0909 2: 0.0000 ; last of cumulative 0.0909
list and Series: 0: nan 1: 0.0909 2: 0.3636 3: nan ; last of cumulative nan
list and dated Series: 0: nan 1: nan 2: nan 2025-02: nan 2025-03: nan 2025-04: nan ; last of cumulative nan
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from realreturndeflator import deflate_series
from realreturndeflator.utils.conversion import exchange_rate_to_depreciation

rates, returns = [100.0, 110.0, 121.0, 181.5], [0.10, 0.20, 0.50]
hand = [(1 + gain) * rates[month] / rates[month + 1] - 1 for month, gain in enumerate(returns)]
fall = exchange_rate_to_depreciation(pd.Series(rates))
dated = exchange_rate_to_depreciation(pd.Series(rates, pd.period_range('2025-01', periods=4, freq='M')))
print('by hand:', *[f'{value:.4f}' for value in hand])
for name, values in (('two lists', fall.tolist()), ('list and Series', fall), ('list and dated Series', dated)):
    seen = deflate_series(returns, values)
    total = deflate_series(returns, values, cumulative=True)
    print(f'{name}:', *[f'{label}: {value:.4f}' for label, value in seen.items()],
          '; last of cumulative', f'{total.iloc[-1]:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

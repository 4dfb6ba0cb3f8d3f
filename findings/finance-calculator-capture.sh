#!/usr/bin/env bash
# The capture ratios of finance-calculator divide the final values and not the returns: cash has a
# ratio of 0.91, and a fund that moves twice as much as the market one of 1.10.
#
# Packages: finance-calculator 0.0.6, numpy 2.4.6, pandas 2.3.3.
# Behaviour: get_upside_capture divides 1 plus the fund's return on days on which the market rises
#   by 1 plus the market's. get_downside_capture divides 1 minus the returns on days on which it
#   falls. A fund that earns nothing has an upside capture of 0.91, and the downside capture of a
#   fund that loses nothing is 0.93 in place of 0.
# Expected: the ratio of the two returns: 0 for cash, 1 for the market.
# Instead: divide the returns, which are in the columns upside_cagr_fund and upside_cagr_index of
#   tail=False.
# Source: Investopedia, Up-Market Capture Ratio; Morningstar, Upside and Downside Capture Ratios.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'finance-calculator==0.0.6'
cat > expected.txt <<'EXPECTED'
cash: upside 0.91, downside 0.93; ratio of the returns 0.00, -0.00
the market: upside 1.00, downside 1.00; ratio of the returns 1.00, 1.00
twice the market: upside 1.10, downside 1.06; ratio of the returns 2.09, 1.93
half of the rises: upside 0.95, downside 1.00; ratio of the returns 0.49, 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import finance_calculator
import numpy as np
import pandas as pd

days = pd.date_range('2024-01-01', periods=21)
market = np.array([0.0] + [0.01, -0.0075] * 10)
funds = {'cash': 0.0 * market, 'the market': market, 'twice the market': 2 * market,
         'half of the rises': np.where(market > 0, market / 2, market)}

def values(returns):
    return list(zip(days, 100 * np.cumprod(1 + returns)))

for name, fund in funds.items():
    up = finance_calculator.get_upside_capture(values(fund), values(market), 0.0, 20, 250, tail=True)
    down = finance_calculator.get_downside_capture(values(fund), values(market), 0.0, 20, 250, tail=True)
    right = [(np.prod(1 + fund[select]) - 1) / (np.prod(1 + market[select]) - 1) for select in (market > 0, market < 0)]
    print(f'{name}: upside {up:.2f}, downside {down:.2f}; ratio of the returns {right[0]:.2f}, {right[1]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

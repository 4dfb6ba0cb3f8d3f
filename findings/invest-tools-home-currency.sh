#!/usr/bin/env bash
# invest-tools converts the prices of shares in pounds as though they were in dollars.
#
# Packages: invest-tools 0.3.0, pandas 1.5.3, numpy 1.24.4, scipy 1.10.1, matplotlib 3.7.5, seaborn 0.12.2.
# Behaviour: a Portfolio in pounds, as in the README, takes shares with the currency "gbp" or "usd". build
#   compares the text with a member of the enumeration Currency, which are never equal, and multiplies the
#   prices of every share by the rate of the dollar. A share in pounds whose price stands still gains and
#   loses what the dollar does, and a portfolio of pounds alone depends on the rate of the dollar.
# Expected: prices in pounds as they are, where the portfolio is in pounds.
# Instead: pass a rate of 1 where all the shares are in pounds, or convert the prices before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'invest-tools==0.3.0' 'pandas==1.5.3' 'numpy==1.24.4' 'scipy==1.10.1' 'matplotlib==3.7.5' 'seaborn==0.12.2'
cat > expected.txt <<'EXPECTED'
HOME in gbp: returns in pounds 5.00 % -4.76 % -5.00 % ; by hand 0.00 % 0.00 % 0.00 %
AWAY in usd: returns in pounds 15.50 % -4.76 % -24.00 % ; by hand 15.50 % -4.76 % -24.00 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import matplotlib

matplotlib.use('Agg')
from invest_tools import portfolio

logging.disable(logging.CRITICAL)
days = [f'{day:02d}/03/2023' for day in (1, 2, 3, 6)]
prices = {'HOME': [100, 100, 100, 100], 'AWAY': [50, 55, 55, 44]}
rates = [0.80, 0.84, 0.80, 0.76]
with open('prices.csv', 'w') as file:
    print('TIDM,Date,Open,High,Low,Close,Volume,Adjustment', file=file)
    for code, series in prices.items():
        for day, price in zip(days, series):
            print(f'{code},{day},{price}.0,{price}.0,{price}.0,{price}.0,1000,1.0', file=file)
with open('dollar.csv', 'w') as file:
    print('Date,Open,High,Low,Close,Adj Close,Volume', file=file)
    for day, rate in zip(days, rates):
        d, m, y = day.split('/')
        print(f'{y}-{m}-{d},{rate},{rate},{rate},{rate},{rate},0', file=file)
names = {'HOME': 'gbp', 'AWAY': 'usd'}
seen = portfolio.Portfolio({code: {'weight': 0.5, 'currency': name} for code, name in names.items()},
                           portfolio.currency.Currency.GBP)
seen.get_usd_converter('dollar.csv')
seen.get_prices('prices.csv')
table = seen.build()
for code, name in names.items():
    values = [p * (r if name == 'usd' else 1) for p, r in zip(prices[code], rates)]
    print(f'{code} in {name}: returns in pounds', *[f'{100 * value:.2f} %' for value in table[code].iloc[1:]],
          '; by hand', *[f'{100 * (b / a - 1):.2f} %' for a, b in zip(values, values[1:])])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# tmval counts the number of preferred shares twice.
#
# Packages: tmval 0.0.12, numpy 1.23.5, scipy 1.10.1, python-dateutil 2.9.0.post0.
# Behaviour: the price of a preferred Stock is shares times the dividend over the rate, and its value is the
#   price times shares again: 100 shares that pay 2 a year at 8 % are worth 250,000, a hundred times 2,500.
# Expected: a price of one share of 25, as for a common stock, and a value of 2,500.
# Instead: make the Stock with shares=1 and multiply its price.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tmval==0.0.12' 'numpy==1.23.5' 'scipy==1.10.1' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
1 shares: price 25.00, value 25.00; as common stock 25.00 and 25.00; by hand 25.00
10 shares: price 250.00, value 2500.00; as common stock 25.00 and 250.00; by hand 250.00
100 shares: price 2500.00, value 250000.00; as common stock 25.00 and 2500.00; by hand 2500.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tmval.rate import Rate
from tmval.stock import Stock

dividend, rate = 2.0, 0.08
for shares in (1, 10, 100):
    seen = Stock(compref='preferred', div=dividend, dfreq=1, gr=Rate(rate), shares=shares)
    common = Stock(price=dividend / rate, shares=shares)
    print(f'{shares} shares: price {float(seen.price):.2f}, value {float(seen.value):.2f};',
          f'as common stock {common.price:.2f} and {common.value:.2f}; by hand {shares * dividend / rate:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

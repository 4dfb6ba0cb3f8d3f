#!/usr/bin/env bash
# option-price values an American call on a share with dividends as a European one.
#
# Packages: option-price 0.2.0, numpy 1.23.5, scipy 1.10.1.
# Behaviour: an Option with european=False and kind='call' has the European price by its methods BSM
#   and MC, whatever the dividends. Early exercise is worthless without dividends only. With
#   dividends of 10 % a call at 80 on a share at 100 is 14.98, though it can be exercised for 20 at
#   once. The binomial tree of the package gives 20.
# Expected: the price of the tree, or no price, as for an American put.
# Instead: use method='BT' with an even number of steps for American options.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'option-price==0.2.0' 'numpy==1.23.5' 'scipy==1.10.1'
cat > expected.txt <<'EXPECTED'
dividends 0%, strike 80: American 23.22, by the tree 23.23, exercised at once 20; European 23.22, by the tree 23.23
dividends 0%, strike 90: American 15.43, by the tree 15.43, exercised at once 10; European 15.43, by the tree 15.43
dividends 0%, strike 100: American 9.41, by the tree 9.41, exercised at once 0; European 9.41, by the tree 9.41
dividends 10%, strike 80: American 14.98, by the tree 20.00, exercised at once 20; European 14.98, by the tree 14.98
dividends 10%, strike 90: American 8.76, by the tree 10.89, exercised at once 10; European 8.76, by the tree 8.76
dividends 10%, strike 100: American 4.64, by the tree 5.45, exercised at once 0; European 4.64, by the tree 4.64
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from optionprice import Option

for dividends in (0.0, 0.10):
    for strike in (80, 90, 100):
        price = {}
        for european in (True, False):
            option = Option(european=european, kind='call', s0=100, k=strike, r=0.03, sigma=0.2, dv=dividends, t=365)
            price[european] = option.getPrice('BSM'), option.getPrice('BT', iteration=500)
        print(f'dividends {dividends:.0%}, strike {strike}: American {price[False][0]:.2f}, by the tree {price[False][1]:.2f},',
              f'exercised at once {100 - strike}; European {price[True][0]:.2f}, by the tree {price[True][1]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

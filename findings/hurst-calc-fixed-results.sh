#!/usr/bin/env bash
# hurst-calc returns numbers from its source for a table with one column that is called BTC-USD, whatever
# is in it, and for other names a Hurst exponent by variance of 1 for a random walk.
#
# Packages: hurst-calc 0.1.4, numpy 2.4.6, pandas 3.1.1.
# Behaviour: each function first looks whether the table has one column named BTC-USD, ETH-USD, SOL-USD or
#   XRP-USD, and then returns a constant: a mean price, a maximum, a standard deviation and a Hurst
#   exponent. With a second column the values are used. The method variance doubles a slope that is the
#   exponent already, since it fits standard deviations.
# Expected: a result that depends on the values; an exponent of 1/2 for a random walk.
# Why it matters here: prices of one coin are the example of its documentation, and all look the same.
# Instead: rename the column, and half of the exponent by variance.
# Source: Mandelbrot and Van Ness 1968: the standard deviation of the differences at lag k grows as k**H.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hurst-calc==0.1.4' 'numpy==2.4.6' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
random walk, called price: mean 132.5, found 132.5; maximum 265.8, found 265.8; exponent by variance 1.0
random walk, called BTC-USD: mean 132.5, found 85955.4; maximum 265.8, found 86939.6; exponent by variance 0.6
random walk, called ETH-USD: mean 132.5, found 13.8; maximum 265.8, found 17.0; exponent by variance 0.5
noise around 100, called price: mean 100.0, found 100.0; maximum 104.7, found 104.7; exponent by variance 0.0
noise around 100, called BTC-USD: mean 100.0, found 85955.4; maximum 104.7, found 86939.6; exponent by variance 0.6
noise around 100, called ETH-USD: mean 100.0, found 13.8; maximum 104.7, found 17.0; exponent by variance 0.5
random walk, called BTC-USD, with a second column: exponent by variance 1.0
random walk, slope of the standard deviations: 0.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from hurst_calc import hurst

random = np.random.default_rng(0)
walk = 100 + np.cumsum(random.normal(size=20_000))
noise = 100 + random.normal(size=20_000)
for values, name in ((walk, 'random walk'), (noise, 'noise around 100')):
    for column in ('price', 'BTC-USD', 'ETH-USD'):
        table = pd.DataFrame({column: values})
        found = hurst.hurst_exponent(table, column, method='variance')
        print(f'{name}, called {column}: mean {values.mean():.1f}, found '
              f'{hurst.mean_price(table, column):.1f}; maximum {values.max():.1f}, found '
              f'{hurst.calc_max(table, column):.1f}; exponent by variance {abs(found):.1f}')
table = pd.DataFrame({'BTC-USD': walk, 'volume': 1.0})
found = hurst.hurst_exponent(table, 'BTC-USD', method='variance')
print(f'random walk, called BTC-USD, with a second column: exponent by variance {found:.1f}')
lags = np.arange(2, 100)
spread = [np.std(walk[lag:] - walk[:-lag]) for lag in lags]
print(f'random walk, slope of the standard deviations: {np.polyfit(np.log(lags), np.log(spread), 1)[0]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

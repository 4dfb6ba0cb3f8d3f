#!/usr/bin/env bash
# option-prices reads the months and per cents of its own examples as years and units.
#
# Packages: option-prices 0.1.1, numpy 2.4.6, scipy 1.17.1.
# Behaviour: the documentation writes time_scale="Month"; bsm knows "month" alone, and takes
#   anything else, "day" too, for years without a message. An at-the-money option of six months
#   costs 19.41 in place of 4.26. binomial knows "month" and divides the step by 12 but not the
#   time, so its options run twelve times too long. Its volatility is a share where that of bsm is
#   in per cent, and the documented sigma=25 makes an option nearly as dear as the share itself.
# Expected: 4.26 for six months in both models, or an error for a scale that is not known.
# Instead: give years, and the volatility of binomial as a share.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'option-prices==0.1.1' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
bsm, 6 months: documented 'Month' 19.41, 'month' 4.26, by hand 4.26
bsm, 30 days: 'day' 42.78, by hand 1.55
binomial, 24 months: 39.70, 2 years by hand 9.82, 24 years 39.70
binomial, 1 year, sigma 0.25: 6.41, bsm with 25: 6.42
binomial, 1 year, sigma 25: 50.00, bsm with 25: 6.42
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from option_prices import binomial, bsm
from scipy.stats import norm

def by_hand(years, volatility=0.25, price=50, strike=50, rate=0.06):
    first = (math.log(price / strike) + (rate + volatility ** 2 / 2) * years) / (volatility * math.sqrt(years))
    second = first - volatility * math.sqrt(years)
    return price * norm.cdf(first) - strike * math.exp(-rate * years) * norm.cdf(second)

option = {'S': 50, 'K': 50, 'r': 6}
print(f"bsm, 6 months: documented 'Month' {bsm(T=6, sigma=25, time_scale='Month', **option):.2f},",
      f"'month' {bsm(T=6, sigma=25, time_scale='month', **option):.2f}, by hand {by_hand(0.5):.2f}")
print(f"bsm, 30 days: 'day' {bsm(T=30, sigma=25, time_scale='day', **option):.2f}, by hand {by_hand(30 / 365):.2f}")
steps = {'T': 24, 'time_step': 0.25, 'time_scale': 'month'}
print(f'binomial, 24 months: {binomial(sigma=0.25, **steps, **option):.2f},',
      f'2 years by hand {by_hand(2):.2f}, 24 years {by_hand(24):.2f}')
for sigma in (0.25, 25):
    print(f'binomial, 1 year, sigma {sigma}: {binomial(T=1, time_step=0.01, sigma=sigma, **option):.2f},',
          f'bsm with 25: {bsm(T=1, sigma=25, **option):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# bond_pricing reads the years of a yield curve as coupon periods, so a price of 1 in 10 years is above 1.
#
# Packages: bond-pricing 1.0.1, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1.
# Behaviour: make_zero_price_fun takes a curve as maturities in years with their rates, and makes the prices
#   at each coupon date. It looks the rates up at 1, 2, 3, ... in place of 1/freq, 2/freq, ...: with
#   half-yearly coupons the price in one year has the rate of two, and from the middle of the curve on
#   the rates are extrapolated by a cubic beyond its end. A bond of 5 years whose coupon is the par rate
#   costs 96 in place of 100, and 129 with quarterly coupons. freq=1, the default, is right.
# Expected: the rate of the knot at the knot, whatever the frequency.
# Instead: par_at_coupon_dates or zero_at_coupon_dates, interpolated by yourself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bond-pricing==1.0.1' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
1 a year, price of 1 after 1, 2, 5 and 10 years: 0.9785, 0.9518, 0.842, 0.6439
  by the rates of the curve 0.9785, 0.9518, 0.842, 0.6439
  bond of 5 years at the par rate: 100.00, in place of 100
2 a year, price of 1 after 1, 2, 5 and 10 years: 0.9755, 0.939, 0.8005, 1.313
  by the rates of the curve 0.9784, 0.9515, 0.8407, 0.6408
  bond of 5 years at the par rate: 95.50, in place of 100
4 a year, price of 1 after 1, 2, 5 and 10 years: 0.9689, 0.9182, 1.145, 2.244e+05
  by the rates of the curve 0.9783, 0.9514, 0.8401, 0.6392
  bond of 5 years at the par rate: 129.34, in place of 100
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from bond_pricing import make_zero_price_fun, zero_curve_bond_price

years, rates = [0, 1, 2, 5, 10], [0.02, 0.022, 0.025, 0.035, 0.045]
for freq in (1, 2, 4):
    zero = make_zero_price_fun(zero_at_knots=(years, rates), freq=freq)
    par = make_zero_price_fun(par_at_knots=(years, rates), freq=freq)
    print(f'{freq} a year, price of 1 after 1, 2, 5 and 10 years:', ', '.join(f'{zero(year):.4g}' for year in years[1:]))
    right = [(1 + rate / freq) ** (-freq * year) for year, rate in zip(years[1:], rates[1:])]
    print('  by the rates of the curve', ', '.join(f'{price:.4g}' for price in right))
    bond = zero_curve_bond_price(cpn=0.035, mat=5, zero_price_fn=par, freq=freq)
    print(f'  bond of 5 years at the par rate: {bond:.2f}, in place of 100')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The alpha of finance-calculator is 0 for every fund with a beta of 1, however much it beats the
# market.
#
# Packages: finance-calculator 0.0.6, numpy 2.4.6, pandas 2.3.3.
# Behaviour: get_alpha subtracts from the fund's return the market's return and beta times the
#   difference of the two, where Jensen's alpha has the risk-free rate in the place of the first
#   and subtracts it from the second. What is left is (1 - beta) times the difference: 0 for a
#   beta of 1, and of the wrong sign above it. The risk-free rate that is asked for is not used.
# Expected: the return less the risk-free rate less beta times the market's return above the
#   risk-free rate.
# Instead: compute it from the returns, with beta of get_beta.
# Source: Jensen, The Performance of Mutual Funds in the Period 1945-1964, Journal of Finance
#   1968; Investopedia, Alpha, which its documentation names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'finance-calculator==0.0.6'
cat > expected.txt <<'EXPECTED'
beta 1.0, +0.1% a day: alpha +0.000, by Jensen +0.250
beta 1.0, +0.0% a day: alpha +0.000, by Jensen +0.000
beta 1.0, -0.1% a day: alpha +0.000, by Jensen -0.250
beta 1.5, +0.1% a day: alpha -0.146, by Jensen +0.275
beta 1.5, +0.0% a day: alpha -0.021, by Jensen +0.025
beta 1.5, -0.1% a day: alpha +0.104, by Jensen -0.225
beta 0.5, +0.1% a day: alpha +0.104, by Jensen +0.225
beta 0.5, +0.0% a day: alpha -0.021, by Jensen -0.025
beta 0.5, -0.1% a day: alpha -0.146, by Jensen -0.275
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import finance_calculator
import numpy as np
import pandas as pd

days = pd.date_range('2024-01-01', periods=251)
random = np.random.default_rng(0)
market = random.normal(0.0004, 0.01, 251)

def values(returns):
    return list(zip(days, 100 * np.cumprod(1 + returns)))

for beta in (1.0, 1.5, 0.5):
    for extra in (0.001, 0.0, -0.001):
        fund = beta * market + extra
        for rate in (0.05,):
            seen = finance_calculator.get_alpha(values(fund), values(market), rate, 250, 250, tail=True)
        daily = 0.05 / 250
        right = sum(fund[1:] - daily - beta * (market[1:] - daily))
        print(f'beta {beta}, {extra:+.1%} a day: alpha {round(seen, 3) + 0.0:+.3f}, by Jensen {round(right, 3) + 0.0:+.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

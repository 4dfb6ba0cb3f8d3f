#!/usr/bin/env bash
# The Sharpe ratio of mvport divides by the variance, so that a loan changes it.
#
# Packages: mvport 1.3.2, numpy 2.0.0, scipy 1.14.0.
# Behaviour: evaluate is documented to return the portfolio's Sharpe ratio. It is the mean above the
#   risk-free rate divided by the variance and not by the standard deviation. Half a portfolio in cash
#   has twice the ratio, and one that is bought with a loan of the same size has half of it, where the
#   Sharpe ratio is the same for all three. For daily returns in per cent it is a hundredth.
# Expected: 0.461 in each row.
# Instead: divide the mean by the root of the variance that is returned.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mvport==1.3.2' 'numpy==2.0.0' 'scipy==1.14.0'
cat > expected.txt <<'EXPECTED'
returns in shares, all in the fund: ratio 25.510, mean by standard deviation 0.461
returns in shares, half in cash: ratio 51.020, mean by standard deviation 0.461
returns in shares, with a loan: ratio 12.755, mean by standard deviation 0.461
returns in per cent, all in the fund: ratio 0.255, mean by standard deviation 0.461
returns in per cent, half in cash: ratio 0.510, mean by standard deviation 0.461
returns in per cent, with a loan: ratio 0.128, mean by standard deviation 0.461
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mvport
import numpy as np

returns = np.array([0.010, 0.030, -0.020, 0.020, 0.015, -0.005])
for unit, scale in (('shares', 1), ('per cent', 100)):
    portfolio = mvport.Portfolio()
    portfolio.add_stock('FUND', returns * scale)
    portfolio.add_stock('CASH', np.zeros(6))
    for name, weights in (('all in the fund', [1, 0]), ('half in cash', [0.5, 0.5]), ('with a loan', [2, -1])):
        mean, variance, ratio, _ = portfolio.evaluate(weights)
        print(f'returns in {unit}, {name}: ratio {ratio:.3f}, mean by standard deviation {mean / variance ** 0.5:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

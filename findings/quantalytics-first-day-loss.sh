#!/usr/bin/env bash
# The drawdowns of quantalytics begin after the first day: a fund that loses half on it has no
# drawdown.
#
# Packages: quantalytics 0.1.24, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, plotly 7.1.0, jinja2
#   3.1.6, matplotlib 3.11.2.
# Behaviour: to_drawdown_series makes prices of the returns and compares them with their highest
#   value so far. The price before the first return is not among them, so the loss of the first
#   day is the level from which it counts. max_drawdown is 0 for -50 %, +10 %, +10 %, the ulcer
#   index is 0 and Calmar's ratio NaN. For yearly or monthly returns the first one is a year or a
#   month.
# Expected: -50 %, the largest loss from what was put in.
# Instead: put a return of 0 before the first one.
# Source: Magdon-Ismail and Atiya, Maximum Drawdown, Risk Magazine 2004.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'plotly==7.1.0' 'jinja2==3.1.6' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'quantalytics==0.1.24'
cat > expected.txt <<'EXPECTED'
[-0.5, 0.1, 0.1]: maximum drawdown 0.00, by hand -0.50; ulcer index 0.00
[0.0, -0.5, 0.1, 0.1]: maximum drawdown -0.50, by hand -0.50; ulcer index 0.45
[-0.3, -0.1, 0.2]: maximum drawdown -0.10, by hand -0.37; ulcer index 0.07
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from quantalytics.analytics import max_drawdown
from quantalytics.analytics.metrics import ulcer_index

for values in ([-0.5, 0.1, 0.1], [0.0, -0.5, 0.1, 0.1], [-0.3, -0.1, 0.2]):
    returns = pd.Series(values, index=pd.date_range('2024-01-31', periods=len(values), freq='ME'))
    wealth = np.concatenate([[1.0], np.cumprod(1 + np.array(values))])
    right = (wealth / np.maximum.accumulate(wealth) - 1).min()
    print(f'{values}: maximum drawdown {max_drawdown(returns) + 0.0:.2f}, by hand {right:.2f}; ulcer index {ulcer_index(returns):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

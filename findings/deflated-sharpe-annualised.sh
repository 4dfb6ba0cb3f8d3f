#!/usr/bin/env bash
# The test of deflated-sharpe takes an annualised Sharpe ratio for the one of a day: of strategies whose returns
# are chance, 45 % have a p-value below 0.05.
#
# Packages: deflated-sharpe 0.1.0, numpy 2.4.6.
# Behaviour: the Sharpe ratio is documented as annualised, and the number of observations as those of the
#   backtest. The standard error is the one of a ratio of one observation, 1 / sqrt(T - 1), and so is the
#   maximum of the trials that is subtracted: a ratio of 252 days is sixteen times as large as both.
# Expected: the ratio and its standard error in one unit. With the ratio of a day the formula is right.
# Why it matters here: the package is made to reject strategies that are good by chance.
# Instead: divide the annualised ratio by the root of the periods of a year.
# Source: Bailey and Lopez de Prado, The deflated Sharpe ratio, 2014.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'deflated-sharpe==0.1.0'
cat > expected.txt <<'EXPECTED'
126 days of chance: p < 0.05 for 46% of 2000 strategies, with the ratio of a day 5%
252 days of chance: p < 0.05 for 47% of 2000 strategies, with the ratio of a day 5%
1260 days of chance: p < 0.05 for 45% of 2000 strategies, with the ratio of a day 4%
the best of 100 strategies of chance, ratio annualised: p < 0.05 for 100% of 500
the best of 100 strategies of chance, ratio of a day: p < 0.05 for 0% of 500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from deflated_sharpe import deflated_sharpe_ratio

random = np.random.default_rng(0)
for days in (126, 252, 1260):
    returns = random.normal(0, 0.01, (2000, days))
    daily = returns.mean(axis=1) / returns.std(axis=1, ddof=1)
    annual = daily * np.sqrt(252)
    as_documented = [deflated_sharpe_ratio(ratio, 1, days)[1] for ratio in annual]
    as_daily = [deflated_sharpe_ratio(ratio, 1, days)[1] for ratio in daily]
    print(f'{days} days of chance: p < 0.05 for {np.mean(np.array(as_documented) < 0.05):.0%} of 2000 strategies, '
          f'with the ratio of a day {np.mean(np.array(as_daily) < 0.05):.0%}')
returns = random.normal(0, 0.01, (500, 100, 252))
best = (returns.mean(axis=2) / returns.std(axis=2, ddof=1)).max(axis=1)
for name, factor in (('annualised', np.sqrt(252)), ('of a day', 1)):
    found = [deflated_sharpe_ratio(ratio * factor, 100, 252)[1] for ratio in best]
    print(f'the best of 100 strategies of chance, ratio {name}: p < 0.05 for {np.mean(np.array(found) < 0.05):.0%} of 500')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

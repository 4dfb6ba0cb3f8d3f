#!/usr/bin/env bash
# The modified Kling-Gupta efficiency of forecast-performance divides the observed variability by the forecast
# one and not the reverse: a forecast without any variability to speak of has one of -98 in place of 0.01.
#
# Packages: forecast-performance 1.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: gamma is the coefficient of variation of the reference by the one of the forecast. Its inverse is
#   in the paper that the docstring names. A forecast with half the variability has the score of one with
#   twice, and the reverse, so that smooth forecasts are punished and wild ones hardly. kge beside it is right.
# Expected: gamma = (σ of the forecast / its mean) / (σ of the observations / their mean).
# Instead: the formula below.
# Source: Kling, Fuchs and Paulin, Runoff conditions in the upper Danube basin, J. Hydrol. 424, 2012, eq. 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'forecast-performance==1.0.0'
cat > expected.txt <<'EXPECTED'
0.01 of the variability: KGE' -98.00, by hand 0.01, KGE 0.01
0.5 of the variability: KGE' 0.00, by hand 0.50, KGE 0.50
1.0 of the variability: KGE' 1.00, by hand 1.00, KGE 1.00
2.0 of the variability: KGE' 0.50, by hand 0.00, KGE 0.00
3.0 of the variability: KGE' 0.33, by hand -1.00, KGE -1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from forecast_performance.metrics import kge, kge_prime

random = np.random.default_rng(0)
flow = pd.Series(100 + 20 * random.normal(0, 1, 2000))
for factor in (0.01, 0.5, 1.0, 2.0, 3.0):
    forecast = flow.mean() + factor * (flow - flow.mean())  # same mean, correlation 1, another variability
    gamma = (forecast.std() / forecast.mean()) / (flow.std() / flow.mean())
    beta, r = forecast.mean() / flow.mean(), np.corrcoef(forecast, flow)[0, 1]
    right = 1 - np.sqrt((r - 1) ** 2 + (gamma - 1) ** 2 + (beta - 1) ** 2)
    print(f'{factor} of the variability: KGE\' {kge_prime(forecast, flow):.2f}, by hand {right:.2f}, '
          f'KGE {kge(forecast, flow):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

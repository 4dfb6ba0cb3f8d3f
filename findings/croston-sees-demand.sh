#!/usr/bin/env bash
# croston forecasts a demand from itself.
#
# Packages: croston 0.1.2.4, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3.
# Behaviour: fit_croston updates its estimate with each demand, and writes the new estimate as the
#   in-sample forecast from the period of that demand on, where the R function that it follows
#   begins with the period after it. The smoothing parameter is chosen by the error of these
#   forecasts, so following each demand is rewarded. If there is a demand in each period the error
#   is smallest for a parameter of 1, whatever the data, and the forecast is the last demand. The
#   first interval counts from 0, so that a series that begins with a demand has one of 0.
# Expected: a small parameter for demand without a trend, as with forecasts that begin one period
#   later.
# Instead: choose the parameter by forecasts that are moved by one period.
# Source: Croston 1972; crost of the R package tsintermittent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'croston==0.1.2.4'
cat > expected.txt <<'EXPECTED'
demand in 100 % of the days: parameter 1.00, error 94; a period later 0.05, 51; of the mean 51
demand in 50 % of the days: parameter 0.01, error 654; a period later 0.02, 650; of the mean 647
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from croston.croston import _croston, fit_croston

draw = np.random.RandomState(0)
for share in (1.0, 0.5):
    seen, late, mean, chosen, right = [], [], [], [], []
    for _ in range(100):
        demand = draw.poisson(50, size=200) * (draw.uniform(size=200) < share)
        past, future = demand[:150], demand[150:]
        fit = fit_croston(past, 50, 'original')
        chosen.append(fit['croston_model']['a_demand'])
        seen.append(np.mean((fit['croston_forecast'] - future) ** 2))
        errors = []
        for parameter in np.arange(0.02, 1.01, 0.02):
            in_sample = _croston(past, 150, 'original', [parameter], 0, 1e-7)['in_sample_forecast']
            errors.append(np.mean((past[1:] - in_sample[:-1].astype(float)) ** 2))
        right.append(0.02 * (1 + np.argmin(errors)))
        forecast = _croston(past, 150, 'original', [right[-1]], 50, 1e-7)['out_of_sample_forecast']
        late.append(np.mean((forecast - future) ** 2))
        mean.append(np.mean((past.mean() - future) ** 2))
    print(f'demand in {100 * share:.0f} % of the days: parameter {np.median(chosen):.2f}, error {np.mean(seen):.0f};',
          f'a period later {np.median(right):.2f}, {np.mean(late):.0f}; of the mean {np.mean(mean):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

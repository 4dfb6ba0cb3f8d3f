#!/usr/bin/env bash
# The percentage error of diebold-mariano-test is negative for negative values, so the worse
# forecast of them is the better one.
#
# Packages: diebold-mariano-test 0.0.8, numpy 2.4.6, scipy 1.17.1.
# Behaviour: MAPE divides the absolute error by the value itself and not by its absolute value.
#   For temperatures below zero, losses or returns the error is below 0, and the more so the worse
#   the forecast: the test finds with a p-value of 0.0000 that errors of 3 degrees are better than
#   errors of 1. With values of both signs the errors cancel.
# Expected: the absolute percentage error, which is never negative; the test statistic has the
#   other sign.
# Instead: cul_d_t with a function of one's own that divides by abs(value).
# Source: Diebold and Mariano, Comparing Predictive Accuracy, 1995; Hyndman and Koehler, Another
#   look at measures of forecast accuracy, 2006.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'diebold-mariano-test==0.0.8'
cat > expected.txt <<'EXPECTED'
above zero, MAE: the forecast with the smaller errors is better, p 0.0000
above zero, MAPE: the forecast with the smaller errors is better, p 0.0000
above zero, absolute: the forecast with the smaller errors is better, p 0.0000
below zero, MAE: the forecast with the smaller errors is better, p 0.0000
below zero, MAPE: the forecast with the larger errors is better, p 0.0000
below zero, absolute: the forecast with the smaller errors is better, p 0.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from diebold_mariano_test import MAE, MAPE, cul_d_t, cul_DM, cul_P

def absolute(t, values, forecast):
    return abs(forecast[t - 1] - values[t - 1]) / abs(values[t - 1])

random = np.random.default_rng(0)
for name, level in (('above zero', 12.0), ('below zero', -12.0)):
    values = list(level + random.uniform(-5, 5, 100))
    good = [value + error for value, error in zip(values, random.normal(0, 1, 100))]
    bad = [value + error for value, error in zip(values, random.normal(0, 3, 100))]
    for loss in (MAE, MAPE, absolute):
        difference = cul_d_t(loss, values, good, bad)
        better = 'smaller' if cul_DM(difference) < 0 else 'larger'
        print(f'{name}, {loss.__name__}: the forecast with the {better} errors is better, p {cul_P(difference):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Hull-White model of PyCurve does not keep the curve that it is given.
#
# Packages: PyCurve 0.1.4, numpy 2.2.6, scipy 1.15.3, matplotlib 3.10.7.
# Behaviour: the drift of the model is theta(t) - alpha * r. The package has alpha * (theta(t) - r),
#   with a theta that contains alpha times the forward rate already, so that rates are drawn to alpha
#   times the curve. With almost no volatility and a flat curve of 5 % the short rate is 0.7 % after
#   30 years for alpha = 0.1 and 2.5 % for 0.5. Only alpha = 1 keeps the 5 %.
# Expected: short rates that stay at 5 %, which the model is made for.
# Instead: simulate dr = (df/dt + alpha * (f - r)) dt + sigma dW, where sigma is small.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyCurve==0.1.4' 'numpy==2.2.6' 'scipy==1.15.3' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
alpha 0.05: short rate 4.82% after 1 years, 3.99% after 5 years, 3.16% after 10 years, 1.31% after 30 years; yield for 30 years 2.75%, of the curve 5.13%
alpha 0.1: short rate 4.67% after 1 years, 3.28% after 5 years, 2.18% after 10 years, 0.72% after 30 years; yield for 30 years 1.95%, of the curve 5.13%
alpha 0.5: short rate 4.17% after 1 years, 2.70% after 5 years, 2.51% after 10 years, 2.50% after 30 years; yield for 30 years 2.70%, of the curve 5.13%
alpha 1.0: short rate 5.00% after 1 years, 5.00% after 5 years, 5.00% after 10 years, 5.00% after 30 years; yield for 30 years 5.13%, of the curve 5.13%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from PyCurve.curve import Curve
from PyCurve.hull_white import HullWhite

years = np.linspace(0, 31, 125)
forward = Curve(years, np.full(125, 0.05))
np.random.seed(0)
for alpha in (0.05, 0.1, 0.5, 1.0):
    model = HullWhite(alpha=alpha, sigma=1e-7, rt=0.05, time=30, delta_time=0.25,
                      instantaneous_forward=forward, method='linear')
    paths = model.simulate_paths(2)
    rates = ', '.join(f'{paths.get_sim[int(4 * y) - 1, 0]:.2%} after {y} years' for y in (1, 5, 10, 30))
    print(f'alpha {alpha}: short rate {rates}; yield for 30 years {np.exp(0) * paths.yield_curve().get_rate[-1]:.2%},',
          f'of the curve {np.exp(0.05) - 1:.2%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

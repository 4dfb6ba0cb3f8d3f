#!/usr/bin/env bash
# ornl-presto's Gaussian mechanism adds 1.4 times too little noise, and 14 times too little where
# the sensitivity is 100.
#
# Packages: ornl-presto 0.1.29, torch 2.13.0, numpy 1.26.4, scipy 1.13.1.
# Behaviour: applyDPGaussian draws with √(sensitivity · ln(1.25 / δ)) / ε. The sensitivity belongs
#   before the root, and a factor of 2 into it; estimate_noise_scale of the same package has both.
#   With a sensitivity below 0.5 the noise is too large.
# Expected: sensitivity · √(2 ln(1.25 / δ)) / ε, the classical Gaussian mechanism, for ε up to 1.
# Why it matters here: the package chooses a mechanism by the error that each has at the same ε;
#   this one wins by being less private.
# Instead: estimate_noise_scale(sensitivity, epsilon, 'gaussian', delta) and numpy.random.normal.
# Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, appendix A; the exact
#   ε from Balle and Wang, ICML 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==1.26.4' 'scipy==1.13.1' 'scikit-learn==1.5.2' 'matplotlib==3.11.2' 'pandas==2.2.3' 'seaborn==0.13.2' 'opacus==1.6.0' 'gpytorch==1.15.2' 'bayesian-optimization==3.4.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ornl-presto==0.1.29'
cat > expected.txt <<'EXPECTED'
sensitivity 0.01: noise 0.34, its own estimate 0.048; ε asked for 1, exact 0.089
sensitivity 1.0: noise 3.4, its own estimate 4.8; ε asked for 1, exact 1.1
sensitivity 100.0: noise 34, its own estimate 4.8e+02; ε asked for 1, exact 16
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ornl_presto import applyDPGaussian
from ornl_presto.metrics import estimate_noise_scale
from scipy.optimize import brentq
from scipy.stats import norm

DELTA = 1e-5


def exact_epsilon(scale, sensitivity):
    """Return the ε of Gaussian noise at δ."""
    ratio = sensitivity / scale

    def excess(epsilon):
        return (norm.cdf(ratio / 2 - epsilon / ratio)
                - np.exp(epsilon + norm.logcdf(-ratio / 2 - epsilon / ratio)) - DELTA)

    return brentq(excess, 0, 1000)


np.random.seed(0)
for sensitivity in (0.01, 1.0, 100.0):
    noise = np.array(applyDPGaussian([0.0] * 200000, sensitivity=sensitivity, delta=DELTA, epsilon=1.0))
    scale = estimate_noise_scale(sensitivity, 1.0, 'gaussian', DELTA)
    print(f'sensitivity {sensitivity}: noise {noise.std():.2g}, its own estimate {scale:.2g}; '
          f'ε asked for 1, exact {exact_epsilon(noise.std(), sensitivity):.2g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The secure noise of declearn, its default, is infinite for one of 4,096 numbers of a float16 gradient and
# for one of 33 million of a float32 gradient, after which the weight is lost.
#
# Packages: declearn 2.9.1, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: GaussianNoiseModule draws uniform numbers below 1, rounds them to the type of the gradient, and
#   takes the normal quantile. The largest draws round to 1, whose quantile is infinite: in float16 those
#   within 2**-12 of 1, in float32 those within 2**-25. The largest finite noise is 3.3 standard deviations
#   upwards in float16. The result is float64, so the rounding saves nothing.
# Expected: normal noise, which is finite; the quantile of the number before it is rounded.
# Why it matters here: a model of a million weights has its first infinite one after some thirty steps, and
#   each weight that it meets in an average of clients.
# Instead: gradients in float64, or safe_mode=False for an experiment.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'declearn==2.9.1' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1'
cat > expected.txt <<'EXPECTED'
float16: infinite about one in 4096, result float64, largest finite below 3.4
float64: infinite none, result float64, largest finite above 3.4
float16, a draw of 1 - 2**-26: noise inf, normal quantile 5.54
float32, a draw of 1 - 2**-26: noise inf, normal quantile 5.54
float64, a draw of 1 - 2**-26: noise 5.54, normal quantile 5.54
float16: draws within 0.000244141 of 1 round to 1, one of 4,096
float32: draws within 2.98023e-08 of 1 round to 1, one of 33,554,432
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from random import SystemRandom

import numpy as np
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import GaussianNoiseModule
from scipy.stats import norm


class LargeDraws(SystemRandom):
    """Draw one of the largest numbers that random() returns, within 2**-25 of 1."""

    def random(self):
        return 1 - 2.0**-26


NUMBERS = 400_000
for kind in ('float16', 'float64'):
    noise = GaussianNoiseModule(std=1.0).run(NumpyVector({'w': np.zeros(NUMBERS, kind)})).coefs['w']
    infinite = np.isinf(noise).sum()
    largest = noise[np.isfinite(noise)].max()
    near = 'about one in 4096' if 50 <= infinite <= 150 else f'{infinite} of {NUMBERS}'
    print(f'{kind}: infinite {near if infinite else "none"}, result {noise.dtype}, '
          f'largest finite {"below" if largest < 3.4 else "above"} 3.4')
for kind in ('float16', 'float32', 'float64'):
    module = GaussianNoiseModule(std=1.0)
    module._rng = LargeDraws()
    [noise] = module.run(NumpyVector({'w': np.zeros(1, kind)})).coefs['w']
    print(f'{kind}, a draw of 1 - 2**-26: noise {noise:.2f}, normal quantile {norm.ppf(1 - 2.0**-26):.2f}')
for kind in ('float16', 'float32'):
    share = (1 - float(np.nextafter(np.ones(1, kind), np.zeros(1, kind))[0])) / 2
    print(f'{kind}: draws within {share:g} of 1 round to 1, one of {1 / share:,.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

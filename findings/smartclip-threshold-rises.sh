#!/usr/bin/env bash
# The percentile threshold of smartclip can only rise, faster and faster: after 30,000 steps it is a million times
# the gradients, and nothing is clipped any more.
#
# Packages: smartclip 0.1.1, numpy 2.4.6.
# Behaviour: AutoClip(mode='percentile') estimates a percentile of the norms by q + alpha (x - q) (p - 1[x < q]). For
#   a norm above q that raises q. For one below q both factors are negative, so it raises q as well, by more
#   the further q is above the norms. history='ema' is the default of this mode.
# Expected: the 95th percentile of the norms, as history='window' finds. The quantile rule has the sign of x - q:
#   q + alpha s (p - 1[x < q]) with a positive scale s.
# Why it matters here: a run of many steps loses its clipping without a message.
# Instead: history='window', or mode='auto'.
# Source: Robbins and Monro (1951), "A stochastic approximation method", for quantiles.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'smartclip==0.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
95th percentile of the norms 1.63, largest norm 3.27
history 'window', step 1000: threshold 1.57, clipped so far 5.2%
history 'window', step 10000: threshold 1.6, clipped so far 5.1%
history 'window', step 30000: threshold 1.64, clipped so far 5.1%
history 'ema', step 1000: threshold 1.6, clipped so far 16.3%
history 'ema', step 10000: threshold 55, clipped so far 1.9%
history 'ema', step 30000: threshold 1.19e+06, clipped so far 0.6%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from smartclip import AutoClip

norms = np.random.default_rng(0).lognormal(0, 0.3, 30000)
print(f'95th percentile of the norms {np.quantile(norms, 0.95):.2f}, largest norm {norms.max():.2f}')
for history in ('window', 'ema'):
    clipper, clipped = AutoClip(mode='percentile', percentile=95, history=history), 0
    for step, norm in enumerate(norms, 1):
        clipper.observe(float(norm))
        clipped += norm > clipper.threshold()
        if step in (1000, 10000, 30000):
            print(f'history {history!r}, step {step}: threshold {clipper.threshold():.3g}, clipped so far '
                  f'{clipped / step:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# mono-binning enforces a trend on the wrong quantity.
#
# Packages: mono-binning 0.1.6, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: mono_bin with force_trend is described as isotonic regression for monotonic classes.
#   Its EVENT_RATE is the share of all defaults that lie in a class, which grows with the size of
#   the class, and not the rate of default in it. Classes of whole numbers have different sizes. The
#   shares are made to rise or fall, and the shares of the others stay as they are, so the weights
#   that come from both rise where a fall was asked for, and a trend that is in the data already is
#   changed.
# Expected: no change for 'i' where the rates rise already; constant weights for 'd'.
# Instead: isotonic regression of EVENT / COUNT with the weights COUNT.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'mono-binning==0.1.6'
cat > expected.txt <<'EXPECTED'
force_trend=None: rates of default [0.07, 0.11, 0.14, 0.18, 0.21]
  EVENT_RATE [0.26, 0.27, 0.22, 0.15, 0.1] sum 1.0
  weights [-0.51, 0.0, 0.27, 0.59, 0.78] information value 0.18
force_trend=i: rates of default [0.07, 0.11, 0.14, 0.18, 0.21]
  EVENT_RATE [0.2, 0.2, 0.2, 0.2, 0.2] sum 1.0
  weights [-0.77, -0.31, 0.17, 0.9, 1.47] information value 0.54
force_trend=d: rates of default [0.07, 0.11, 0.14, 0.18, 0.21]
  EVENT_RATE [0.27, 0.27, 0.22, 0.15, 0.1] sum 1.0
  weights [-0.48, -0.03, 0.27, 0.59, 0.78] information value 0.18
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from mono_binning import mono_bin

draw = np.random.RandomState(0)
loans = draw.poisson(2, size=20000).astype(float)
default = (draw.uniform(size=20000) < np.clip(0.05 + 0.03 * loans, 0, 1)).astype(int)
for trend in (None, 'i', 'd'):
    classes, _ = mono_bin(default, loans, force_trend=trend)
    print(f'force_trend={trend}: rates of default', (classes['EVENT'] / classes['COUNT']).round(2).tolist())
    print('  EVENT_RATE', classes['EVENT_RATE'].round(2).tolist(), 'sum', round(classes['EVENT_RATE'].sum(), 2))
    print('  weights', classes['WOE'].round(2).tolist(), f'information value {classes["IV"].sum():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

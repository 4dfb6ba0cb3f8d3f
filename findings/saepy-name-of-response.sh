#!/usr/bin/env bash
# The bootstrap criteria of saepy depend on the name of the response: they are right for y alone.
#
# Packages: saepy 0.2.0, numpy 2.2.6, scipy 1.15.3, pandas 2.2.3, patsy 1.0.1, statsmodels 0.14.4.
# Behaviour: the parametric bootstrap of eblupFH draws a new response, stores it in the column y of
#   a copy and fits the formula to the copy. Where the response of the formula has another name, each
#   of the B fits is the fit of the original data, and AICc, KICc and the bootstrap criteria compare
#   them with responses that nothing was fitted to. The model with the right covariate can then have
#   the worse criterion.
# Expected: the same numbers for the same data, whatever the column is called.
# Why it matters here: the model of a small area's rate of disease is chosen by them.
# Instead: rename the response to y before the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'pandas==2.2.3' 'patsy==1.0.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'saepy==0.2.0'
cat > expected.txt <<'EXPECTED'
response y: AIC 113.8, AICc 114.4, AICb1 107.8, AICb2 103.4, KICc 119.6, KICb1 113.0, KICb2 108.6
response rate: AIC 113.8, AICc 107.3, AICb1 108.9, AICb2 110.1, KICc 106.7, KICb1 108.4, KICb2 109.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from saePy.eblupFH import eblupFH

random = np.random.default_rng(0)
x, other = random.uniform(1, 5, (2, 30))
variance = random.uniform(0.5, 1.5, 30)
rate = 2 + 3 * x + random.normal(0, 1, 30) + random.normal(0, np.sqrt(variance))
for response in ('y', 'rate'):
    table = pd.DataFrame({response: rate, 'x': x, 'other': other, 'variance': variance})
    np.random.seed(1)
    fit = eblupFH(f'{response} ~ x', 'variance', data=table, B=100)['fit']
    shown = ('AIC', 'AICc', 'AICb1', 'AICb2', 'KICc', 'KICb1', 'KICb2')
    print(f'response {response}:', ', '.join(f'{name} {fit["goodness"][name]:.1f}' for name in shown))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# ControlCharts's limit of the Q statistic is not the one of Jackson and Mudholkar.
#
# Packages: ControlCharts 1.0.0, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2,
#   matplotlib 3.10.6.
# Behaviour: the limit needs the sums of the residual eigenvalues, of their squares and of their
#   cubes. T2 takes the sum, its square and its cube, so with more than one residual component the
#   limit is too high. The eigenvalues come from numpy.linalg.eig, which does not sort them, and the
#   first ones are left out as if they were the largest. p_value=0.9 should let one reading of a
#   stable process in ten pass the limit, as it says of the training readings.
# Expected: about 10 % of the readings above the limit.
# Instead: the limit by hand, as below, of the residual eigenvalues.
# Source: Jackson and Mudholkar, Technometrics 1979.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2' 'matplotlib==3.10.6' 'setuptools==80.9.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps --no-build-isolation 'ControlCharts==1.0.0'
cat > expected.txt <<'EXPECTED'
2 of 3 components kept: limit 211.8, 0.0 % above; by Jackson and Mudholkar 2.6, 10.5 %
2 of 4 components kept: limit 5.3, 7.5 % above; by Jackson and Mudholkar 4.5, 10.5 %
2 of 8 components kept: limit 16.0, 1.8 % above; by Jackson and Mudholkar 10.7, 9.3 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from ControlCharts import T2
from scipy.stats import norm

draw = np.random.RandomState(0)
for scales in ((10, 9, 1), (10, 9, 1, 1), (10, 9, 1, 1, 1, 1, 1, 1)):
    readings = pd.DataFrame(draw.normal(size=(4000, len(scales))) * scales)
    with contextlib.redirect_stdout(io.StringIO()):
        chart = T2(explained_variance=0.94, p_value=0.9)
        chart.fit(readings[:2000])
        chart.predict(readings[2000:], plot_fig=False)
    values = np.sort(np.linalg.eigvalsh(np.cov(readings[:2000].values.T)))[::-1][chart.n_components:]
    first, second, third = ((values**power).sum() for power in (1, 2, 3))
    h = 1 - 2 * first * third / (3 * second**2)
    limit = first * (1 + norm.ppf(0.9) * h * np.sqrt(2 * second) / first + second * h * (h - 1) / first**2) ** (1 / h)
    above = [100 * (chart.q['Q'] > bound).mean() for bound in (chart.q_ucl, limit)]
    print(f'{chart.n_components} of {len(scales)} components kept: limit {chart.q_ucl:.1f}, {above[0]:.1f} % above;',
          f'by Jackson and Mudholkar {limit:.1f}, {above[1]:.1f} %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

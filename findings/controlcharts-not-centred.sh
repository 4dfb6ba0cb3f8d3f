#!/usr/bin/env bash
# ControlCharts computes Hotelling's T² without the mean.
#
# Packages: ControlCharts 1.0.0, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2,
#   matplotlib 3.10.6.
# Behaviour: T2 learns the covariance of the training readings, and computes x S⁻¹ x for each new
#   one, where Hotelling's statistic has x - mean. With scaling=False, its default, and
#   using_pca=False readings of a blood pressure and a pulse have a T² of some hundred, whatever
#   they are, and a limit of 15: all of them are anomalies, and the worst is the one that is
#   farthest from 0. The documented example has a mean of 0. The Q statistic of using_pca=True is
#   not centred either.
# Expected: one reading in a thousand above the limit, whatever the mean is.
# Instead: scaling=True, or subtract the mean of the training readings.
# Source: Hotelling 1947; Mujica and others, Structural Health Monitoring 2010, the first source of
#   the package.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2' 'matplotlib==3.10.6' 'setuptools==80.9.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps --no-build-isolation 'ControlCharts==1.0.0'
cat > expected.txt <<'EXPECTED'
mean 0, {'using_pca': False}: T2 above 16.4: 0.2 %
mean 0, {'using_pca': False, 'scaling': True}: T2 above 16.4: 0.2 %
mean 0, {}: T2 above 13.9: 0.1 %, Q above 1.7: 0.1 %
pressure, pulse, temperature, {'using_pca': False}: T2 above 16.4: 100.0 %
pressure, pulse, temperature, {'using_pca': False, 'scaling': True}: T2 above 16.4: 0.1 %
pressure, pulse, temperature, {}: T2 above 13.9: 0.1 %, Q above 1.7: 100.0 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from ControlCharts import T2

draw = np.random.RandomState(0)
for name, mean in (('mean 0', (0, 0, 0)), ('pressure, pulse, temperature', (120, 70, 37))):
    readings = pd.DataFrame(np.array(mean) + draw.normal(size=(2000, 3)) * (10, 5, 0.4), columns=['a', 'b', 'c'])
    old, new = readings[:1000], readings[1000:]
    for options in ({'using_pca': False}, {'using_pca': False, 'scaling': True}, {}):
        with contextlib.redirect_stdout(io.StringIO()):
            chart = T2(**options)
            chart.fit(old)
            chart.predict(new, plot_fig=False)
        text = f'T2 above {chart.t2_ucl:.1f}: {100 * (chart.t2["T2"] > chart.t2_ucl).mean():.1f} %'
        if chart.n_components < 3:
            text += f', Q above {chart.q_ucl:.1f}: {100 * (chart.q["Q"] > chart.q_ucl).mean():.1f} %'
        print(f'{name}, {options}: {text}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

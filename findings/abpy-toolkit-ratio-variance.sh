#!/usr/bin/env bash
# abpy-toolkit divides the variance of a ratio by n twice.
#
# Packages: abpy-toolkit 0.1.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, matplotlib 3.10.6.
# Behaviour: with is_ratio=True the variance of the ratio of two sums, such as costs per visit,
#   comes from the delta method, "correct variance estimation for ratio metrics". That variance is
#   already the one of the ratio, divided by the number of people. The t-test takes it for the
#   variance of one person and divides again, so that the standard error is too small by the root of
#   the number of people, the interval with it, and the required number of people by their number.
# Expected: a p-value below 0.05 in 5 % of the comparisons of equal groups.
# Instead: multiply corrected_var by n, as the standard deviation beside it is computed.
# Source: Deng, Knoblich and Lu, Applying the Delta Method in Metric Analytics, 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'matplotlib==3.10.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'abpy-toolkit==0.1.1'
cat > expected.txt <<'EXPECTED'
50 people in each of two equal groups: significant 76 %, half of the interval 4.22; by hand 5 %, 29.45
500 people in each of two equal groups: significant 94 %, half of the interval 0.43; by hand 5 %, 9.59
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from abpy import Experiment
from abpy.metrics.continous import run_continous_test

draw = np.random.RandomState(0)
for people in (50, 500):
    significant, right, widths = 0, 0, []
    for _ in range(200):
        visits = 1 + draw.poisson(3, size=2 * people)
        costs = visits * draw.gamma(2, 50, size=2 * people)
        table = pd.DataFrame({'variant': ['a'] * people + ['b'] * people, 'metric1': costs, 'metric2': visits})
        table.to_csv('groups.csv', index=False)
        experiment = Experiment(metric='continous', input='csv', is_ratio=True)
        experiment.fit('groups.csv')
        seen = run_continous_test(experiment)['a vs b']
        significant += seen['p_value'] < 0.05
        ratio = costs.reshape(2, -1).sum(axis=1) / visits.reshape(2, -1).sum(axis=1)
        rest = costs.reshape(2, -1) - ratio[:, None] * visits.reshape(2, -1)
        error = np.sqrt((rest.var(axis=1, ddof=1) / people / visits.reshape(2, -1).mean(axis=1) ** 2).sum())
        right += abs(ratio[1] - ratio[0]) > 1.96 * error
        widths.append((np.ptp(seen['confidence_interval']) / 2, 1.96 * error))
    seen_width, right_width = np.median(widths, axis=0)
    print(f'{people} people in each of two equal groups: significant {significant / 2:.0f} %, half of the interval',
          f'{seen_width:.2f}; by hand {right / 2:.0f} %, {right_width:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# change-point-analyzer reports other days than the one of the change.
#
# Packages: change-point-analyzer 0.0.5, numpy 1.26.4, matplotlib 3.10.6.
# Behaviour: the package follows the analysis of W. Taylor. Its default estimator splits the series
#   at each day from the fourth on, and returns the place in this list plus 1, so that a change at
#   day 60 is reported at 57. It adds the variances of the two parts without their lengths, where
#   Taylor adds squares. The estimator CUSUM takes the largest value of the cumulative sum, where
#   Taylor takes the largest absolute value: where the values rise, the sum is lowest at the change,
#   and largest at the beginning or the end, where it is 0.
# Expected: day 60, the first day after the change, or day 59, the last one before it.
# Instead: argmax of numpy.abs(series_cusum[0]), plus 1.
# Source: Taylor, Change-Point Analysis: A Powerful New Tool For Detecting Changes, 2000.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'matplotlib==3.10.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'change-point-analyzer==0.0.5'
cat > expected.txt <<'EXPECTED'
fall of 5 on day 60: default [57, 58], CUSUM [59], by Taylor [60]
rise of 5 on day 60: default [57, 58], CUSUM [99], by Taylor [59, 60]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from change_point_analyzer.main import ChangePointAnalyzer

np.random.seed(0)
draw = np.random.RandomState(0)
for name, step in (('fall of 5', -5.0), ('rise of 5', 5.0)):
    default, cusum, right = [], [], []
    for _ in range(20):
        series = 100 + draw.normal(size=100)
        series[60:] += step
        analyzer = ChangePointAnalyzer(series, bootstrap_samples=100)
        default.append(int(analyzer.compute_changepoint_mse()[0]))
        cusum.append(int(analyzer.compute_changepoint_s_diff()[0]))
        right.append(int(np.abs(analyzer.series_cusum[0]).argmax()) + 1)
    print(f'{name} on day 60: default {sorted(set(default))}, CUSUM {sorted(set(cusum))},',
          f'by Taylor {sorted(set(right))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

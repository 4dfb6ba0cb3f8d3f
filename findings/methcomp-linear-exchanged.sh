#!/usr/bin/env bash
# The linear regression of methcomp fits the first method from the second and draws it the other way round,
# with a band of 5 % confidence where it is asked for 95 %.
#
# Packages: methcomp 1.0.0, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, statsmodels 0.14.4, shapely 2.0.7,
#   matplotlib 3.9.4.
# Behaviour: linear fits method1 = a + b method2 and labels and draws method2 = a + b method1. A second method
#   that reads twice as much has a slope of 0.5. Its interval is conf_int(alpha=CI), and alpha is what is left
#   out: CI=0.95 gives the band of 5 %, which is narrower than the one for CI=0.5.
# Expected: the second method from the first, as the labels say, and a band of CI.
# Instead: statsmodels with method2 as outcome, and conf_int(alpha=1 - CI).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'methcomp==1.0.0' 'numpy==1.26.4' 'scipy==1.10.1' \
  'pandas==2.2.3' 'statsmodels==0.14.4' 'shapely==2.0.7' 'matplotlib==3.9.4'
cat > expected.txt <<'EXPECTED'
CI=0.5: methcomp 2.48 + 0.46 * Method 1, slopes of the lines drawn [0.473, 0.487]; by hand 6.75 + 1.94, 1.879 to 1.994
CI=0.8: methcomp 4.29 + 0.47 * Method 1, slopes of the lines drawn [0.473, 0.478]; by hand 6.75 + 1.94, 1.826 to 2.046
CI=0.95: methcomp 5.11 + 0.47 * Method 1, slopes of the lines drawn [0.473, 0.474]; by hand 6.75 + 1.94, 1.766 to 2.107
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import numpy
from matplotlib import pyplot
from methcomp import linear
from scipy import stats

generator = numpy.random.default_rng(0)
one = generator.normal(100, 15, 50)
other = 2 * one + generator.normal(0, 8, 50)
right = stats.linregress(one, other)
for level in (0.5, 0.8, 0.95):
    axes = linear(one, other, CI=level, line_CI=True, ax=pyplot.subplots()[1])
    ends = [numpy.polyfit(line.get_xdata(), line.get_ydata(), 1)[0] for line in axes.lines[2:]]
    half = stats.t.ppf(0.5 + level / 2, 48) * right.stderr
    print(f'CI={level}: methcomp {axes.get_legend_handles_labels()[1][1]}, slopes of the lines drawn '
          f'{[round(float(end), 3) for end in ends]}; by hand {right.intercept:.2f} + {right.slope:.2f}, '
          f'{right.slope - half:.3f} to {right.slope + half:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

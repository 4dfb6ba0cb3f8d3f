#!/usr/bin/env bash
# The restricted mean survival time of coxrmstsimpson can be negative, or longer than the time.
#
# Packages: coxrmstsimpson 0.2.3, scipy 1.17.1, pandas 2.3.3, numpy 2.4.6, matplotlib 3.11.2.
# Behaviour: simpson_rmst(time, survival) lays parabolas through three points each. Where the second interval is more than
#   twice as long as the first one, the first point has a negative weight. Times of deaths are that uneven, and the
#   function asks only that they rise. cox_rmst, which makes an even grid, is right.
# Expected: the area under a curve between 0 and 1 is between 0 and the length of time. The area under the steps,
#   or under straight lines between the points, is the one to compare with.
# Instead: scipy.integrate.trapezoid, or the sum of the steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scipy==1.17.1' 'pandas==2.3.3' \
  'numpy==2.4.6' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'coxrmstsimpson==0.2.3'
cat > expected.txt <<'EXPECTED'
every year: 4 years, by straight lines 3.20, by steps 3.40, coxrmstsimpson 3.20
after 1, 6, 12, 24 and 120 months: 10 years, by straight lines 5.86, by steps 6.36, coxrmstsimpson 4.99
early deaths, then a long time: 10 years, by straight lines 4.89, by steps 5.25, coxrmstsimpson -9.33
one late step: 10 years, by straight lines 9.05, by steps 9.90, coxrmstsimpson 18.65
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from coxrmstsimpson import simpson_rmst
from scipy.integrate import trapezoid

cases = {
    'every year': ([0, 1, 2, 3, 4], [1, 0.9, 0.8, 0.7, 0.6]),
    'after 1, 6, 12, 24 and 120 months': (np.array([0, 1, 6, 12, 24, 120]) / 12, [1, 0.9, 0.8, 0.7, 0.6, 0.5]),
    'early deaths, then a long time': ([0, 0.5, 10], [1, 0.5, 0.45]),
    'one late step': ([0, 9, 10], [1, 0.9, 0.1]),
}
for name, (time, survival) in cases.items():
    steps = np.sum(np.diff(time) * np.array(survival)[:-1])
    print(f'{name}: {time[-1]:.0f} years, by straight lines {trapezoid(survival, time):.2f}, by steps {steps:.2f},',
          f'coxrmstsimpson {simpson_rmst(time, survival):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

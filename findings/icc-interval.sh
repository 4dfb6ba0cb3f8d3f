#!/usr/bin/env bash
# icc's confidence interval for agreement misses the truth twice as often as it says.
#
# Packages: icc 0.1.1, numpy 1.26.4, scipy 1.13.1.
# Behaviour: all intervals use the quantile of F at the confidence level, 0.95, for both ends, where
#   an interval with two ends needs 0.975. The package names R's irr as its base, which halves the
#   error. The example of Shrout and Fleiss has 0.41 to 0.93 in place of 0.34 to 0.95.
# Expected: an interval that contains the true coefficient in 95 % of the samples.
# Why it matters here: agreement of raters, or of two releases of a private statistic, is reported
#   by the lower end of this interval.
# Instead: confidence_level=0.975 for an interval of 95 %.
# Source: Shrout and Fleiss, Psychological Bulletin 1979; McGraw and Wong, Psychological Methods
#   1996.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'icc==0.1.1'
cat > expected.txt <<'EXPECTED'
example of 1979, ICC(3,1): icc 0.41 to 0.93, published 0.34 to 0.95
  with confidence_level=0.975: 0.34 to 0.95
2000 samples of 20 people and 3 raters: 90% of the intervals contain the truth, 95% with half of the error at each end
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from icc import icc
from scipy.stats import f

ratings = np.array([[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]])
low, high = icc(ratings, 'twoway', 'consistency', 'single')[5:]
print(f'example of 1979, ICC(3,1): icc {low:.2f} to {high:.2f}, published 0.34 to 0.95')
low, high = icc(ratings, 'twoway', 'consistency', 'single', confidence_level=0.975)[5:]
print(f'  with confidence_level=0.975: {low:.2f} to {high:.2f}')

random = np.random.default_rng(0)
truth, subjects, raters = 0.6, 20, 3
inside, exact = 0, 0
for _ in range(2000):
    people = random.normal(0, truth ** 0.5, (subjects, 1))
    table = people + random.normal(0, (1 - truth) ** 0.5, (subjects, raters))
    value = icc(table, 'oneway', 'agreement', 'single')
    inside += value[5] <= truth <= value[6]
    ratio, first, second = value[1], subjects - 1, subjects * (raters - 1)
    bounds = [(share - 1) / (share + raters - 1) for share in
              (ratio / f.ppf(0.975, first, second), ratio * f.ppf(0.975, second, first))]
    exact += bounds[0] <= truth <= bounds[1]
print(f'2000 samples of 20 people and 3 raters: {inside / 2000:.0%} of the intervals contain the truth, '
      f'{exact / 2000:.0%} with half of the error at each end')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

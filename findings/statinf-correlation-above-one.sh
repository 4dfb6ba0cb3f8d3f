#!/usr/bin/env bash
# The correlation of statinf is n/(n - 1) times the right one: 1.25 for five points on a line.
#
# Packages: statinf 1.3.0, pycof 1.5.15, jax 0.6.1, jaxlib 0.6.1, numpy 1.26.4, pandas 2.2.3, scipy 1.11.4,
#   matplotlib 3.11.2.
# Behaviour: pearson divides the covariance with n - 1 in its denominator by standard deviations with n.
# Expected: at most 1, and the same as numpy.corrcoef.
# Why it matters here: a correlation above 1 is an error at once, one of 0.95 in place of 0.86 is not; small studies
#   agree more than large ones.
# Instead: numpy.corrcoef.
# Source: Pearson (1896), "Mathematical contributions to the theory of evolution III", Philosophical Transactions of the
#   Royal Society A 187.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statinf==1.3.0' 'pycof==1.5.15' 'jax==0.6.1' 'jaxlib==0.6.1' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.11.4' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
five points on a line: statinf 1.25
5 people: statinf 1.068, numpy 0.854
10 people: statinf 1.043, numpy 0.938
30 people: statinf 0.913, numpy 0.883
1000 people: statinf 0.895, numpy 0.894
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from statinf.stats import pearson

random = np.random.default_rng(0)
print(f'five points on a line: statinf {pearson([1, 2, 3, 4, 5], [2, 4, 6, 8, 10]):.2f}')
for people in (5, 10, 30, 1000):
    first = random.normal(size=people)
    second = first + 0.5 * random.normal(size=people)
    print(f'{people} people: statinf {pearson(first, second):.3f}, numpy {np.corrcoef(first, second)[0, 1]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

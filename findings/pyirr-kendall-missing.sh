#!/usr/bin/env bash
# pyirr's Kendall's W divides by patients that it leaves out.
#
# Packages: pyirr 0.84.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, statsmodels 0.14.5.
# Behaviour: kendall counts the patients first and then drops those with a missing grade. The sum of
#   squares is of the patients that remain, and it is divided by the one that perfect agreement
#   about all patients would have, so the coefficient falls with the number of missing grades. The
#   degrees of freedom count them too. The other coefficients of the package drop first.
# Expected: 1 for perfect agreement about the remaining patients, as without the others.
# Instead: drop rows with missing grades before the call.
# Source: the function kendall of the R package irr, which pyirr ports, drops them first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'statsmodels==0.14.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pyirr==0.84.1.2'
cat > expected.txt <<'EXPECTED'
0 of 20 patients with a missing grade: W 1.00, 20 subjects; dropped before 1.00, 20 subjects
1 of 20 patients with a missing grade: W 0.90, 20 subjects; dropped before 1.00, 19 subjects
4 of 20 patients with a missing grade: W 0.65, 20 subjects; dropped before 1.00, 16 subjects
10 of 20 patients with a missing grade: W 0.26, 20 subjects; dropped before 1.00, 10 subjects
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyirr import kendall

for missing in (0, 1, 4, 10):
    grades = np.tile(np.arange(20.0)[:, None], 3)
    grades[np.arange(20 - missing, 20), 0] = np.nan
    seen = kendall(grades.copy(), correct=True)
    rest = kendall(grades[: 20 - missing].copy(), correct=True)
    print(f'{missing} of 20 patients with a missing grade: W {seen.value:.2f}, {seen.subjects} subjects;',
          f'dropped before {rest.value:.2f}, {rest.subjects} subjects')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

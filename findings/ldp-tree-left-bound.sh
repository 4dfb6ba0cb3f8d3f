#!/usr/bin/env bash
# A range query of hierarchical-mechanism-LDP does not count its first value and counts its last: the
# smallest value is in no range.
#
# Packages: ldp-hierarchical-mechanism 0.1.3 (hierarchical_mechanism_LDP), numpy 1.26.4, scipy 1.13.1,
#   pandas 2.2.3, statsmodels 0.14.4, tqdm 4.67.1.
# Behaviour: get_range_query(left, right) subtracts the people up to and with left from those up to and
#   with right. Of 10000 people, 4000 with the value 0, the range from 0 to the end has 6000.
# Expected: the people from left up to, without, right: the documentation compares the result with
#   np.sum(data >= left) - np.sum(data >= right).
# Why it matters here: a length of stay of 0 days, or the code 0 of a diagnosis, is in no answer.
# Instead: get_range_query(left - 1, right - 1), and for a range from 0 the people less the rest.
# Source: the package's documentation, Range Queries.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ldp-hierarchical-mechanism==0.1.3' 'numpy==1.26.4' 'scipy==1.13.1' 'pandas==2.2.3' 'statsmodels==0.14.4' 'tqdm==4.67.1'
cat > expected.txt <<'EXPECTED'
range 0 to 1: 1500, documented 4000, without the first and with the last 1500
range 0 to 4: 4900, documented 8000, without the first and with the last 4800
range 0 to 7: 6100, documented 9800, without the first and with the last 6000
range 1 to 3: 2600, documented 3000, without the first and with the last 2500
range 4 to 7: 1200, documented 1800, without the first and with the last 1200
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import random

import numpy as np
from hierarchical_mechanism_LDP import Private_TreeBary

days = np.repeat(np.arange(8), [4000, 1500, 1500, 1000, 800, 600, 400, 200])
random.seed(0)
np.random.seed(0)
tree = Private_TreeBary(8, 2, 6.0)
tree.update_tree(days)
for left, right in ((0, 1), (0, 4), (0, 7), (1, 3), (4, 7)):
    documented = np.sum(days >= left) - np.sum(days >= right)
    shifted = np.sum(days > left) - np.sum(days > right)
    print(f'range {left} to {right}: {round(tree.get_range_query(left, right), -2):.0f},',
          f'documented {documented}, without the first and with the last {shifted}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

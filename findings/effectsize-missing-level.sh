#!/usr/bin/env bash
# The weighted effect size of effectsize cuts its table of categories in two halves, so with a
# category that one group lacks it compares the shares of other categories.
#
# Packages: effectsize 1.0.0, numpy 1.26.4, pandas 1.5.3, scipy 1.13.1, statsmodels 0.14.4.
# Behaviour: With weights, compute_categorical makes one table of the shares by group and category
#   and takes its first and second half for the two groups. Where a group has no person in a
#   category, the table has a row less for it, and the halves do not match the groups. An even
#   number of rows gives a number without a warning: here 0.32 or 1.15, by which group lacks the
#   categories, where 0.73 is right.
# Expected: a share of 0 for a category that a group lacks.
# Instead: pandas.crosstab with the weights, which has each category for each group.
# Source: Yang and Dalton, A unified approach to measuring the effect size between two groups
#   using SAS, SAS Global Forum 2012.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==1.5.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'effectsize==1.0.0'
cat > expected.txt <<'EXPECTED'
all categories in both: 0.23, by the formula 0.23
none of c and d in group 0: 0.32, by the formula 0.73
none of c and d in group 1: 1.15, by the formula 0.73
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import effectsize
import numpy as np
import pandas as pd

def make(first, second):
    rows = [(0, c) for c, n in first.items() for _ in range(n)] + [(1, c) for c, n in second.items() for _ in range(n)]
    return pd.DataFrame(rows, columns=['group', 'smoking']).assign(weight=1.0)

def right(table):
    shares = pd.crosstab(table.group, table.smoking, normalize='index').to_numpy()
    a, b = shares[0][1:], shares[1][1:]
    spread = (np.diag(a) - np.outer(a, a) + np.diag(b) - np.outer(b, b)) / 2
    return float(np.sqrt((b - a) @ np.linalg.inv(spread) @ (b - a)))

tables = {'all categories in both': make({'a': 50, 'b': 30, 'c': 20}, {'a': 40, 'b': 40, 'c': 20}),
          'none of c and d in group 0': make({'a': 70, 'b': 30}, {'a': 50, 'b': 30, 'c': 10, 'd': 10}),
          'none of c and d in group 1': make({'a': 50, 'b': 30, 'c': 10, 'd': 10}, {'a': 70, 'b': 30})}
for name, table in tables.items():
    seen = effectsize.compute(table, 'group', categorical=['smoking'], weights='weight')
    print(f'{name}: {float(seen.iloc[0, 0]):.2f}, by the formula {right(table):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Gini coefficient of povertyinequalitymeasures leaves the first part of the Lorenz curve out.
#
# Packages: povertyinequalitymeasures 1.1.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: get_gini adds the area under the Lorenz curve from the first row on and not from the
#   origin, so that the triangle below the poorest row is missing. Its square of share and income is
#   added to the coefficient. Two households with one income have 0.25 in place of 0, and a table of
#   five income groups with the same people in each has 0.28 in place of 0.27. Where the poorest row
#   stands for 40 % of the people, 0.29 becomes 0.36.
# Expected: 0 where all incomes are equal, for any number of rows.
# Instead: put a row with income 0 and a weight that is almost 0 into the table, or use one row for
#   each person.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'povertyinequalitymeasures==1.1.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
two equal households: 0.250, from all pairs 0.000
five equal groups: 0.040, from all pairs 0.000
five income groups: 0.280, from all pairs 0.267
the poorest are 40 %: 0.364, from all pairs 0.291
a thousand equal households: 0.000, from all pairs 0.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from povertyInequalityMeasures import inequality


def by_pairs(incomes, weights):
    x, w = np.asarray(incomes, dtype=float), np.asarray(weights, dtype=float)
    w = w / w.sum()
    return (w[:, None] * w[None, :] * np.abs(x[:, None] - x[None, :])).sum() / (2 * (w * x).sum())


for name, incomes, weights in (
    ('two equal households', [30, 30], [1, 1]),
    ('five equal groups', [30] * 5, [20] * 5),
    ('five income groups', [10, 20, 30, 40, 50], [20] * 5),
    ('the poorest are 40 %', [10, 20, 30, 40], [40, 20, 20, 20]),
    ('a thousand equal households', [30] * 1000, [1] * 1000),
):
    table = pd.DataFrame({'income': incomes, 'weight': weights})
    print(f'{name}: {inequality.get_gini(table, "income", "weight"):.3f}, from all pairs {by_pairs(incomes, weights):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

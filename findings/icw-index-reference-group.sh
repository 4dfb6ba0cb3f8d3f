#!/usr/bin/env bash
# icw-index weights its indicators by the covariance of everybody, where a reference group is given for
# it: the treatment changes the index of the people who were not treated.
#
# Packages: icw-index 0.1.0, numpy 2.2.6.
# Behaviour: reference_mask is documented as the group for the covariance, as normby() of Stata's swindex.
#   Only means, standard deviations and the final scale come from it; the inverse covariance, which is
#   the weighting, is of all rows. A treatment that raises one indicator lowers its weight.
# Expected: weights of the control group, so that its index does not depend on the others.
# Why it matters here: an effect on an index is compared before and after privacy, and the index itself
#   moves with the treated group.
# Instead: compute the weights of numpy.cov of the reference group, as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'icw-index==0.1.0'
cat > expected.txt <<'EXPECTED'
effect 0 on the first indicator: on the index 0.06, with weights of the controls 0.06; a control moves by up to 0.00
effect 1 on the first indicator: on the index 0.41, with weights of the controls 0.49; a control moves by up to 0.24
effect 3 on the first indicator: on the index 0.56, with weights of the controls 1.35; a control moves by up to 0.90
effect 10 on the first indicator: on the index 0.27, with weights of the controls 4.35; a control moves by up to 1.38
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from icw import icw_index

random = np.random.default_rng(0)
people = 2000
common = random.normal(size=people)
first = common + random.normal(size=people)
second = common + random.normal(size=people)
control = np.arange(people) < people // 2


def by_hand(columns):
    rows = np.column_stack(columns)
    rows = (rows - rows[control].mean(axis=0)) / rows[control].std(axis=0, ddof=1)
    weights = np.linalg.inv(np.cov(rows[control], rowvar=False)).sum(axis=1)
    index = rows @ weights
    return (index - index[control].mean()) / index[control].std(ddof=1)


untouched = icw_index([first, second], reference_mask=control)[control]
for effect in (0, 1, 3, 10):
    columns = [first + effect * ~control, second]
    seen, right = icw_index(columns, reference_mask=control), by_hand(columns)
    moved = np.abs(seen[control] - untouched).max()
    print(f'effect {effect} on the first indicator: on the index {seen[~control].mean():.2f},',
          f'with weights of the controls {right[~control].mean():.2f};',
          f'a control moves by up to {moved:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

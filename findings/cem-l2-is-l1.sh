#!/usr/bin/env bash
# The L2 imbalance of cem is its L1 imbalance: the root is taken of each square and not of their sum, so
# the choice between the two measures changes nothing.
#
# Packages: cem 1.1.0, pandas 2.3.3, numpy 1.26.4.
# Behaviour: cem.imbalance.L2 adds up sqrt((p - q)**2), the absolute differences of the shares of the
#   strata, and halves them. coarsen(measure='l2') therefore always returns the same bins as measure='l1'.
# Expected: a number that weighs large differences more, sqrt(sum((p - q)**2)), up to a factor. Ten strata
#   that differ by little and two that differ by all of it have the same L1 and other L2.
# Why it matters here: a second measure that agrees is taken for a confirmation.
# Instead: compute it from the shares of the strata.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cem==1.1.0' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
difference spread over ten strata: L1 0.20, L2 0.20, root of the sum of squares 0.13
difference in two strata: L1 0.20, L2 0.20, root of the sum of squares 0.28
coarsen returned the same bins for both measures in 20 of 20 tables
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from cem.coarsen import coarsen
from cem.imbalance import L1, L2

random = np.random.default_rng(0)


def make(treated, control):
    strata = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in (treated, control)])
    return pd.DataFrame({'stratum': strata, 'treated': np.repeat([1, 0], [sum(treated), sum(control)])})


for name, treated, control in (('spread over ten strata', 5 * [12, 8], 5 * [8, 12]),
                               ('in two strata', [20, 0] + 8 * [10], [0, 20] + 8 * [10])):
    table = make(treated, control)
    shares = [np.array(counts) / sum(counts) for counts in (treated, control)]
    right = np.sqrt(np.sum((shares[0] - shares[1])**2))
    print(f'difference {name}: L1 {L1(table, "treated"):.2f}, L2 {L2(table, "treated"):.2f}, '
          f'root of the sum of squares {right:.2f}')
same = 0
for repeat in range(20):
    table = pd.DataFrame({'treated': random.integers(0, 2, 300).astype(bool).astype(str)})
    table['age'] = random.normal(50, 10, 300) + 5 * (table.treated == 'True')
    table['weight'] = random.normal(70, 10, 300)
    with contextlib.redirect_stdout(io.StringIO()):
        bins = [coarsen(table, 'treated', measure=measure, lower=2) for measure in ('l1', 'l2')]
    same += bins[0].equals(bins[1])
print(f'coarsen returned the same bins for both measures in {same} of 20 tables')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

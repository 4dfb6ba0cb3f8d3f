#!/usr/bin/env bash
# The Sen index of poverty in povertyinequalitymeasures depends on the incomes of the rich.
#
# Packages: povertyinequalitymeasures 1.1.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: get_sen_index refers to page 74 of the handbook of the World Bank, where the index is
#   headcount * G + gap * (1 - G) and G is the Gini coefficient among the poor. The package takes the
#   Gini coefficient of all people. Where the poor stay as they are and the richest person has more,
#   poverty rises from 0.32 to 0.48, where 0.31 is right in each case. Where all poor people
#   have the same income, the index should be the gap, 0.20, and is 0.27 to 0.48.
# Expected: an index that does not change with incomes above the poverty line.
# Instead: compute G from the rows below the line.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'povertyinequalitymeasures==1.1.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
four incomes among the poor, richest has 200: 0.321, by the definition 0.312
four incomes among the poor, richest has 2000: 0.335, by the definition 0.312
four incomes among the poor, richest has 20000: 0.409, by the definition 0.312
four incomes among the poor, richest has 200000: 0.483, by the definition 0.312
all poor have 60, richest has 200: 0.265, by the definition 0.200
all poor have 60, richest has 2000: 0.283, by the definition 0.200
all poor have 60, richest has 20000: 0.378, by the definition 0.200
all poor have 60, richest has 200000: 0.476, by the definition 0.200
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from povertyInequalityMeasures import poverty


def gini(incomes):
    incomes = np.asarray(incomes, dtype=float)
    pairs = np.abs(incomes[:, None] - incomes[None, :])
    return pairs.mean() / (2 * incomes.mean())


for name, poor in (('four incomes among the poor', [20, 40, 60, 80] * 25), ('all poor have 60', [60] * 100)):
    for richest in (200, 2000, 20000, 200000):
        incomes = poor + [150] * 99 + [richest]
        table = pd.DataFrame({'income': incomes, 'weight': 1})
        seen = poverty.get_sen_index(100, table, 'income', 'weight')
        headcount, gap = len(poor) / len(incomes), sum(1 - x / 100 for x in poor) / len(incomes)
        print(f'{name}, richest has {richest}: {seen:.3f},',
              f'by the definition {headcount * gini(poor) + gap * (1 - gini(poor)):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

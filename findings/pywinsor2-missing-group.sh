#!/usr/bin/env bash
# pywinsor2 drops the people whose group is missing.
#
# Packages: pywinsor2 0.4.3, pandas 2.3.3, numpy 2.3.3.
# Behaviour: with by, the table is put together from its groups, and pandas leaves rows with a
#   missing group out of them. They are not in the result, in no column, without a message; of two
#   group columns one missing value is enough. The rows come back sorted by their index, in another
#   order.
# Expected: all rows, as without by, with unchanged values where there is no group: a function that
#   "replicates and extends" Stata's winsor2, which adds a variable and keeps each observation.
# Instead: fill the missing groups with a value of their own first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'pywinsor2==0.4.3'
cat > expected.txt <<'EXPECTED'
people 6 sum of costs 5680.0
without by: people 6, sum of costs 5680, costs [900.0, 50.0, 10.0, 20.0, 4000.0, 700.0]
by ward: people 4, sum of costs 1630, costs [700.0, 20.0, 10.0, 900.0]
by ward, replaced: people 4, sum of costs 1630, costs [702.0, 19.9, 10.1, 898.0]
by filled ward: people 6, sum of costs 5680, costs [700.0, 4000.0, 20.0, 10.0, 50.0, 900.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from pywinsor2 import winsor2

people = pd.DataFrame({'ward': ['B', None, 'A', 'A', None, 'B'], 'cost': [900.0, 50, 10, 20, 4000, 700]},
                      index=[5, 4, 3, 2, 1, 0])
print('people', len(people), 'sum of costs', people['cost'].sum())
for label, made in (('without by', winsor2(people, 'cost', cuts=(1, 99))),
                    ('by ward', winsor2(people, 'cost', cuts=(1, 99), by='ward')),
                    ('by ward, replaced', winsor2(people, 'cost', cuts=(1, 99), by='ward', replace=True)),
                    ('by filled ward', winsor2(people.fillna({'ward': 'none'}), 'cost', cuts=(1, 99), by='ward'))):
    print(f"{label}: people {len(made)}, sum of costs {made['cost'].sum():.0f}, costs {made['cost'].tolist()}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# mpitb counts some people who are deprived in exactly half of the index as poor and others not.
#
# Packages: mpitb 0.2, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3.
# Behaviour: a person is poor whose weighted deprivations reach the cutoff. The weights of the global
#   index, 1/6 and 1/18, are added as floating-point numbers and compared with k / 100 without a
#   tolerance. For k = 50, the cutoff of severe poverty, 28 of the 128 ways to be deprived in exactly
#   half are below it, such as years of schooling with all six indicators of living standards.
# Expected: all of them poor, as the score is equal to the cutoff.
# Instead: give a cutoff that is slightly smaller, such as k = 49.99.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mpitb==0.2' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
cutoff 50 %: of 128 ways to be deprived in exactly half 28 are not poor; at or above 50 % by fractions 576, in mpitb 548
  not poor: schooling, electricity, water, sanitation, housing, fuel, assets
  not poor: attendance, electricity, water, sanitation, housing, fuel, assets
cutoff 49.99 %: of 128 ways to be deprived in exactly half 0 are not poor; at or above 50 % by fractions 576, in mpitb 576
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fractions import Fraction
from itertools import product

import pandas as pd
from mpitb.core import MPIToolbox

living = ['electricity', 'water', 'sanitation', 'housing', 'fuel', 'assets']
names = ['mortality', 'nutrition', 'attendance', 'schooling'] + living
tool = MPIToolbox()
tool.set(name='mpi', dimensions=[(names[:2], 'health'), (names[2:4], 'education'), (living, 'standard')])
ways = list(product((0, 1), repeat=10))
table = pd.DataFrame(ways, columns=names)
score = [sum(Fraction(1, 6) * x for x in way[:4]) + sum(Fraction(1, 18) * x for x in way[4:]) for way in ways]
for k in (50, 49.99):
    seen = table.copy()
    tool.est(seen, 'mpi', klist=[k])
    half = [(way, poor) for way, exact, poor in zip(ways, score, seen[f'poor_{k}']) if exact == Fraction(1, 2)]
    not_poor = [way for way, poor in half if not poor]
    print(f'cutoff {k} %: of {len(half)} ways to be deprived in exactly half {len(not_poor)} are not poor;',
          f'at or above 50 % by fractions {sum(exact >= Fraction(1, 2) for exact in score)}, in mpitb {seen[f"poor_{k}"].sum()}')
    for way in not_poor[:2]:
        print('  not poor:', ', '.join(name for name, x in zip(names, way) if x))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The concentration index of simpleci is the same for a disease of the poor and for one of the rich.
#
# Packages: simpleci-nfarrokhian 0.2.5, numpy 2.4.6, pandas 2.3.3, matplotlib 3.11.2.
# Behaviour: the concentration index is twice the area between the diagonal and the curve, negative
#   where the curve is above it, which tells whether the poor or the rich have the disease. RCI takes
#   the absolute area of a polygon. ACI multiplies it by the mean of the rates of the groups, not by
#   the rate of the people: with groups of unequal size the absolute index is several times too large.
# Expected: -0.267 for the disease of the poor and +0.267 for the one of the rich.
# Instead: one minus the sum of the areas below the curve, as it is computed here.
# Source: Wagstaff, Paci and van Doorslaer, On the measurement of inequalities in health, 1991.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'matplotlib==3.11.2' 'simpleci-nfarrokhian==0.2.5'
cat > expected.txt <<'EXPECTED'
a disease of the poor: concentration index 0.267, by its definition -0.267
a disease of the rich: concentration index 0.267, by its definition +0.267
groups of 9000, 500 and 500: absolute index 0.0347, by its definition +0.0090
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from simpleci.simpleci import ACI, RCI

def index(people, cases):
    share, ill = np.cumsum(people) / np.sum(people), np.cumsum(cases) / np.sum(cases)
    share, ill = np.append(0, share), np.append(0, ill)
    return 1 - np.sum(np.diff(share) * (ill[1:] + ill[:-1]))

people = np.array([1000, 1000, 1000, 1000, 1000])
for name, cases in (('of the poor', [50, 40, 30, 20, 10]), ('of the rich', [10, 20, 30, 40, 50])):
    cases = np.array(cases)
    print(f'a disease {name}: concentration index {RCI(people, cases):.3f}, by its definition {index(people, cases):+.3f}')
people = np.array([9000, 500, 500])
cases = np.array([90, 50, 60])
print(f'groups of 9000, 500 and 500: absolute index {ACI(people, cases, cases / people):.4f},',
      f'by its definition {index(people, cases) * cases.sum() / people.sum():+.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pyliferisk gives the probability to die in a later year as 7.75, and its functions for commutation numbers
# differ from the numbers.
#
# Packages: pyliferisk 1.12.0.
# Behaviour: tqxn(table, x, n, t) is documented as the probability to survive n years and to die in the t
#   years after. It is the survival of t years times the death within the first year after n, in
#   per mille: 7.75 for a client of 40 and the year after 50, and less for five years than for one.
#   Cx(table, x) is Cx of the table times 1 + i, so that the functions Cx do not add up to Mx.
# Expected: (lx at x + n minus lx at x + n + t) / lx at x, and one meaning of Cx.
# Instead: lx, and the attribute Cx of the table.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyliferisk==1.12.0'
cat > expected.txt <<'EXPECTED'
client of 40, death within 1 years after 50: tqxn 7.7517, counted 0.0074
client of 40, death within 5 years after 50: tqxn 7.6375, counted 0.0448
client of 40, death within 10 years after 50: tqxn 7.4178, counted 0.1142
at 60: Mx 18598, sum of the attribute Cx 18598, of the function Cx 18970
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from pyliferisk import Actuarial, Cx, Mx, lx, tqxn

hazard = [0.00005 * (math.exp(0.1 * (age + 1)) - math.exp(0.1 * age)) / 0.1 for age in range(115)]
life = Actuarial(nt=[0] + [1000 * (1 - math.exp(-rate)) for rate in hazard] + [1000], i=0.02)
for years in (1, 5, 10):
    counted = (lx(life, 50) - lx(life, 50 + years)) / lx(life, 40)
    print(f'client of 40, death within {years} years after 50:',
          f'tqxn {tqxn(life, 40, 10, years):.4f}, counted {counted:.4f}')
total = sum(Cx(life, age) for age in range(60, 115))
print(f'at 60: Mx {Mx(life, 60):.0f}, sum of the attribute Cx {sum(life.Cx[60:]):.0f},',
      f'of the function Cx {total:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

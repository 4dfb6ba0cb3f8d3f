#!/usr/bin/env bash
# The growing annuities of pyliferisk forget that the mortality was scaled.
#
# Packages: pyliferisk 1.12.0.
# Behaviour: Actuarial(..., perc=50) makes a table with half the mortality, and aax, Ax and the others use
#   it. qaax, qax, qaxn, qaaxn and qAx, for payments that grow each year, build a new table without
#   perc, that is with 100 %: a pension for life that grows by 0 % is worth 10.5 where the
#   constant one is worth 14.1. Also mx, documented as the central rate of mortality, returns qx, the
#   probability of death.
# Expected: a growth of 0 % changes nothing, since qaax(table, x, 0) is aax(table, x); mx is the deaths
#   divided by the mean number alive.
# Instead: multiply the probabilities yourself before the table is made.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyliferisk==1.12.0'
cat > expected.txt <<'EXPECTED'
100 % of the mortality, from 65 on: constant 10.51 (summed 10.51), growing by 0 % 10.51, by 1 % 11.26 (summed 11.26)
50 % of the mortality, from 65 on: constant 14.12 (summed 14.12), growing by 0 % 10.51, by 1 % 11.26 (summed 15.48)
at 95: mx 0.505, qx 0.505, deaths by the mean number alive 0.675
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from pyliferisk import Actuarial, aax, lx, mx, qaax, qx

hazard = [0.00005 * (math.exp(0.1 * (age + 1)) - math.exp(0.1 * age)) / 0.1 for age in range(115)]
table = [0] + [1000 * (1 - math.exp(-rate)) for rate in hazard] + [1000]
for share in (100, 50):
    life = Actuarial(nt=table, i=0.02, perc=share)
    alive = [lx(life, age) for age in range(65, 115)]
    sums = [
        sum((grown / 1.02) ** year * number / alive[0] for year, number in enumerate(alive))
        for grown in (1, 1.01)
    ]
    print(f'{share} % of the mortality, from 65 on: constant {aax(life, 65):.2f} (summed {sums[0]:.2f}),',
          f'growing by 0 % {qaax(life, 65, 0):.2f}, by 1 % {qaax(life, 65, 0.01):.2f} (summed {sums[1]:.2f})')
life = Actuarial(nt=table, i=0.02)
died, number = lx(life, 95) - lx(life, 96), (lx(life, 95) + lx(life, 96)) / 2
print(f'at 95: mx {mx(life, 95):.3f}, qx {qx(life, 95) / 1000:.3f},',
      f'deaths by the mean number alive {died / number:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

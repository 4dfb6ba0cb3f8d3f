#!/usr/bin/env bash
# The monthly deferred annuity of pyliferisk is corrected with the wrong endowment.
#
# Packages: pyliferisk 1.12.0.
# Behaviour: taax(table, x, t, m) is the value of a pension that starts in t years and is paid m times a
#   year. A pension paid at the start of each month is worth 11/24 of a year's payment less than one
#   paid yearly, seen from its first day, so 11/24 of the value of a payment on that day now. taax subtracts
#   11/24 of the rest to 1: the correction of a temporary annuity. The younger the client, the more is
#   missing; shortly before the pension it is too much. tax, paid at the ends, adds the same part.
# Expected: taax(table, x, t, m) = nEx(table, x, t) aax(table, x + t, m), as it is for m = 1.
# Instead: that product.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyliferisk==1.12.0'
cat > expected.txt <<'EXPECTED'
a pension of 12000 a year from 65 on
client of 25: yearly 16712 (product 16712), monthly 12038 (product 15885), -24%
client of 35: yearly 24998 (product 24998), monthly 20734 (product 23762), -13%
client of 45: yearly 38071 (product 38071), monthly 34454 (product 36188), -5%
client of 55: yearly 60886 (product 60886), monthly 58397 (product 57875), +1%
client of 64: yearly 103603 (product 103603), monthly 103226 (product 98479), +5%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from pyliferisk import Actuarial, aax, nEx, taax

hazard = [0.00005 * (math.exp(0.1 * (age + 1)) - math.exp(0.1 * age)) / 0.1 for age in range(115)]
table = [0] + [1000 * (1 - math.exp(-rate)) for rate in hazard] + [1000]
life = Actuarial(nt=table, i=0.04)
print('a pension of 12000 a year from 65 on')
for age in (25, 35, 45, 55, 64):
    years = 65 - age
    yearly, monthly = (12000 * taax(life, age, years, m) for m in (1, 12))
    product = [12000 * nEx(life, age, years) * aax(life, 65, m) for m in (1, 12)]
    print(f'client of {age}: yearly {yearly:.0f} (product {product[0]:.0f}),',
          f'monthly {monthly:.0f} (product {product[1]:.0f}), {monthly / product[1] - 1:+.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

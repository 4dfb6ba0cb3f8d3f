#!/usr/bin/env bash
# detax takes the tax year 2015, 2016 or 2017 and has the German income tax of 2016 for all of them.
#
# Packages: detax 0.1.
# Behaviour: the year is checked against 2015, 2016 and 2017 and then not used: the limits and the formula are
#   the ones of 2016. Its documented example, 50,000 euros in 2017, has a tax of 12,636 where 12,561 are due.
#   An income of 8,800 in 2017 is taxed, though up to 8,820 nothing is due.
# Expected: the tariff of the year (section 32a of the German income tax act), or an error for other years.
# Instead: the formulas below.
# Source: section 32a EStG in its versions for 2015, 2016 and 2017. The script checks that each tariff has no
#   jump at its limits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'detax==0.1'
cat > expected.txt <<'EXPECTED'
2015: largest jump of the official tariff 0.0
2016: largest jump of the official tariff 0.0
2017: largest jump of the official tariff 0.0
8800 in 2015: detax 20, by the tariff 46
8800 in 2016: detax 20, by the tariff 20
8800 in 2017: detax 20, by the tariff 0
20000 in 2015: detax 2560, by the tariff 2611
20000 in 2016: detax 2560, by the tariff 2560
20000 in 2017: detax 2560, by the tariff 2520
50000 in 2015: detax 12636, by the tariff 12757
50000 in 2016: detax 12636, by the tariff 12636
50000 in 2017: detax 12636, by the tariff 12561
100000 in 2015: detax 33605, by the tariff 33738
100000 in 2016: detax 33605, by the tariff 33605
100000 in 2017: detax 33605, by the tariff 33524
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import floor

from detax import TaxData

# limits of the zones, and the numbers of the formulas of the zones
TARIFFS = {
    2015: (8472, 13469, 52881, 997.6, 228.74, 948.68, 8261.29),
    2016: (8652, 13669, 53665, 993.62, 225.4, 952.48, 8394.14),
    2017: (8820, 13769, 54057, 1007.27, 223.76, 939.57, 8475.44),
}

def exact(year, income, zone=None):
    free, second, third, a, b, c, d = TARIFFS[year]
    if zone is None:
        zone = 1 + (income > free) + (income > second) + (income > third)
    y, z = (income - free) / 10000, (income - second) / 10000
    return (0, (a * y + 1400) * y, (b * z + 2397) * z + c, 0.42 * income - d)[zone - 1]

for year, (_, second, third, *_) in TARIFFS.items():
    jumps = [abs(exact(year, x, k) - exact(year, x, k + 1)) for x, k in ((second, 2), (third, 3))]
    print(f'{year}: largest jump of the official tariff {max(jumps):.1f}')
for income in (8800, 20000, 50000, 100000):
    for year in TARIFFS:
        data = TaxData(year)
        data.income = income
        tax = data.calc_tax()[0][0]
        print(f'{income} in {year}: detax {tax}, by the tariff {floor(exact(year, income))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

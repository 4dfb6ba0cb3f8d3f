#!/usr/bin/env bash
# taxman charges everybody above the allowance the tax of 46,350 a year: 6,900 for an income of 12,000.
#
# Packages: taxman 0.2.0.
# Behaviour: the income in the basic rate is the width of the whole band, 46,350 less the allowance, as soon as
#   an income is above the allowance. Who earns 11,850 pays nothing, who earns 11,851 pays 6,900, and so does
#   everybody up to 46,350. Net pay falls by 58 % with the last pound.
# Expected: a fifth of what is above the allowance and below 46,350 (the rates for England of 2018/19, which
#   the package has: 20 % to 46,350, 40 % to 150,000, then 45 %).
# Why it matters here: net incomes of most people are wrong, and the ones of the poorest most.
# Instead: the formula by hand, below; incomes above 46,350 are right, as long as the allowance is not reduced.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'taxman==0.2.0'
cat > expected.txt <<'EXPECTED'
11850 a year: income tax 0, by hand 0
11851 a year: income tax 6900, by hand 0
12000 a year: income tax 6900, by hand 30
20000 a year: income tax 6900, by hand 1630
30000 a year: income tax 6900, by hand 3630
46350 a year: income tax 6900, by hand 6900
60000 a year: income tax 12360, by hand 12360
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from taxman.allowance.personal_allowance import PersonalAllowance
from taxman.calculator.calculator import Calculator
from taxman.income.employment import Employment

ALLOWANCE = 11850

def by_hand(income):
    bands = ((ALLOWANCE, 46350, 0.20), (46350, 150000, 0.40), (150000, float('inf'), 0.45))
    return sum(rate * (min(income, top) - bottom) for bottom, top, rate in bands if income > bottom)

for income in (11850, 11851, 12000, 20000, 30000, 46350, 60000):
    summary = Calculator([Employment(income)], [PersonalAllowance(ALLOWANCE)]).calculate()
    print(f'{income} a year: income tax {summary.income_tax:.0f}, by hand {by_hand(income):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

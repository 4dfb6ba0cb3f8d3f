#!/usr/bin/env bash
# taxman taxes the first job of a person and pays out the second one whole, though it counts both as income.
#
# Packages: taxman 0.2.0.
# Behaviour: the calculator takes a list of incomes and adds them up for the total and the net income. The tax
#   and the national insurance look at the first employment of the list alone. Two jobs of 40,000 and 60,000
#   have a tax of 6,900 or of 12,360 by their order, and a net income of 92,784 or 87,238.
# Expected: the tax of the sum, 28,360 with the rates of the package: income tax is due on all of it together.
# Why it matters here: the net income of a person depends on which job is written first.
# Instead: pass one employment with the sum of the salaries.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'taxman==0.2.0'
cat > expected.txt <<'EXPECTED'
jobs of 40000 and 60000: income 100000, income tax 6900, insurance 3789, net 92784
jobs of 60000 and 40000: income 100000, income tax 12360, insurance 4825, net 87238
one job of 100000: income 100000, income tax 28360, insurance 5625, net 71171
by hand for an income of 100000: income tax 28360
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from taxman.allowance.personal_allowance import PersonalAllowance
from taxman.calculator.calculator import Calculator
from taxman.income.employment import Employment

def show(name, *salaries):
    result = Calculator([Employment(x) for x in salaries], [PersonalAllowance(11850)]).calculate()
    print(f'{name}: income {result.total_income}, income tax {result.income_tax:.0f}, '
          f'insurance {12 * result.employees_ni:.0f}, net {result.net_income:.0f}')

show('jobs of 40000 and 60000', 40000, 60000)
show('jobs of 60000 and 40000', 60000, 40000)
show('one job of 100000', 100000)
tax = 0.2 * (46350 - 11850) + 0.4 * (100000 - 46350)
print(f'by hand for an income of 100000: income tax {tax:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

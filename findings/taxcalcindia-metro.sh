#!/usr/bin/env bash
# taxcalcindia asks whether a person lives in a metro and exempts half of the salary as rent allowance anyway.
#
# Packages: taxcalcindia 0.1.4.
# Behaviour: the exemption for a house rent allowance is limited to 50 % of the salary in Delhi, Mumbai, Kolkata
#   and Chennai and to 40 % elsewhere (rule 2A of the income tax rules). TaxSettings has is_metro_resident for
#   it and the models have both factors, but the calculator always takes 50 %. Employees of the government have
#   no exemption at all.
# Expected: 200,000 in place of 250,000 for a salary of 500,000 outside of the four cities, and the same for
#   employees of the government.
# Instead: pass the smaller of the allowance and 40 % of the salary as the allowance, the rest as another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'taxcalcindia==0.1.4'
cat > expected.txt <<'EXPECTED'
metro True, private: exempt 250000, by rule 2A 250000
metro True, government: exempt 0, by rule 2A 250000
metro False, private: exempt 250000, by rule 2A 200000
metro False, government: exempt 0, by rule 2A 200000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from taxcalcindia import Deductions, IncomeTaxCalculator, SalaryIncome, TaxSettings
from taxcalcindia.models import EmploymentType

SALARY, ALLOWANCE, RENT = 500000, 260000, 400000
for metro in (True, False):
    for employer in (EmploymentType.PRIVATE, EmploymentType.GOVERNMENT):
        calculator = IncomeTaxCalculator(
            settings=TaxSettings(age=40, financial_year=2025, is_metro_resident=metro, employment_type=employer),
            salary=SalaryIncome(basic_and_da=SALARY, hra=ALLOWANCE),
            deductions=Deductions(rent_for_hra_exemption=RENT))
        by_hand = min(ALLOWANCE, (0.5 if metro else 0.4) * SALARY, RENT - 0.1 * SALARY)
        print(f'metro {metro}, {employer.value}: exempt {calculator.total_deductions:.0f}, by rule 2A {by_hand:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# canatax subtracts the basic personal amount from the income before it looks for the brackets, where Canadian law gives a
# credit at the lowest rate: an income of 150,000 pays 1,727 dollars too little to the federation.
#
# Packages: canatax 2.0.1.
# Behaviour: the tax is computed for the income without the amount, with the brackets from 0 on. The amount then saves the
#   highest rate that a person pays, and all brackets begin later by it. In the lowest bracket both are equal; the
#   higher the income, the larger the error. The taxes of the provinces are computed in the same way.
# Expected: the tax of the brackets on the whole taxable income, less the lowest rate times the amount.
# Why it matters here: the tax is right for low incomes and wrong for those for whom brackets matter.
# Instead: the formula below, with the tables of the package.
# Source: Income Tax Act of Canada, subsections 117(2) and 118(1): the basic personal amount is a credit at the
#   appropriate percentage, the lowest rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'canatax==2.0.1'
cat > expected.txt <<'EXPECTED'
20000 a year: federal tax 644, with the credit 644
50000 a year: federal tax 5144, with the credit 5144
70000 a year: federal tax 8144, with the credit 8839
100000 a year: federal tax 14125, with the credit 14989
150000 a year: federal tax 25450, with the credit 27177
250000 a year: federal tax 53481, with the credit 55516
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

from canatax import IncomeTaxCalculator

for income in (20000, 50000, 70000, 100000, 150000, 250000):
    with contextlib.redirect_stdout(io.StringIO()):        # it prints the income and the tax
        calculator = IncomeTaxCalculator(income=income, province='ON')
        seen = calculator._calculate().federal_tax
    rates = calculator.federal_tax_rate
    amount, tax, bottom = float(rates.get_bpa(calculator.income)), 0.0, 0.0
    for rate, top in rates.brackets:
        tax += float(rate) / 100 * max(0, min(income, float(top)) - bottom)
        bottom = float(top)
    right = tax - float(rates.brackets[0][0]) / 100 * amount
    print(f'{income} a year: federal tax {seen:.0f}, with the credit {right:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

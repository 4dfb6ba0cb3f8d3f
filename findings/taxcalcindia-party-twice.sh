#!/usr/bin/env bash
# taxcalcindia deducts a donation to a political party twice: 100,000 given lower the income by 200,000.
#
# Packages: taxcalcindia 0.1.4.
# Behaviour: the sum of the deductions of the old regime names section_80ggc two times. 100,000 for a party
#   lower the tax of an income of 1,500,000 by 62,400, more than half of what was given; the same donation under
#   section 80GGA or 80E lowers it by 31,200.
# Expected: each deduction once: section 80GGC allows the amount that was given.
# Why it matters here: the old regime is then recommended to people for whom the new one is cheaper.
# Instead: pass half of the donation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'taxcalcindia==0.1.4'
cat > expected.txt <<'EXPECTED'
100000 in section_80e: deducted 100000, tax 226200, lower by 31200
100000 in section_80gga: deducted 100000, tax 226200, lower by 31200
100000 in section_80g_100percent: deducted 100000, tax 226200, lower by 31200
100000 in section_80ggc: deducted 200000, tax 195000, lower by 62400
by hand: lower by 31200
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from taxcalcindia import Deductions, IncomeTaxCalculator, SalaryIncome, TaxSettings

def compute(**given):
    calculator = IncomeTaxCalculator(
        settings=TaxSettings(age=40, financial_year=2025),
        salary=SalaryIncome(basic_and_da=1500000),
        deductions=Deductions(**given))
    result = calculator.calculate_tax(is_comparision_needed=True, is_tax_per_slab_needed=False,
                                      display_result=False)
    return calculator.total_deductions, result['tax_liability']['old_regime']['total']

_, without = compute()
for section in ('section_80e', 'section_80gga', 'section_80g_100percent', 'section_80ggc'):
    deducted, tax = compute(**{section: 100000})
    print(f'100000 in {section}: deducted {deducted:.0f}, tax {tax:.0f}, lower by {without - tax:.0f}')
# 30 % above 1,000,000 and a cess of 4 % on the tax
print(f'by hand: lower by {100000 * 0.30 * 1.04:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# ngtaxkit deducts no pension from wages that are exempt from income tax.
#
# Packages: ngtaxkit 0.1.1.
# Behaviour: paye.calculate with pension_contributing=True returns a pension of 0, for the employee and for
#   the employer, and no housing fund, where the wages are at or below the limit of exemption, and the net
#   wage is the gross wage. One naira more a year and 8 %, 10 % and 2.5 % are due. The package's own
#   explain_calculate says for the exempt wages: "Employee pension deduction = gross annual income *
#   employee pension rate."
# Expected: the contributions, which do not depend on the income tax.
# Instead: compute the contributions apart where the result is exempt.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ngtaxkit==0.1.1'
cat > expected.txt <<'EXPECTED'
wages of 800000 a year: exempt True, tax 0.00; pension of employee and employer 0 and 0, by the rates 64000 and 80000; housing fund 0, by the rate 20000; net a month 66666.67 of 66666.67
wages of 800001 a year: exempt False, tax 0.00; pension of employee and employer 64000 and 80000, by the rates 64000 and 80000; housing fund 20000, by the rate 20000; net a month 59666.74 of 66666.75
Employee pension deduction = gross annual income * employee pension rate.
NHF deduction = gross annual income * NHF rate.
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ngtaxkit import paye
from ngtaxkit.rates import get_float

limit = get_float('paye.exemptionThreshold')
rates = [get_float(f'pension.minimumRates.{who}') for who in ('employee', 'employer')]
fund = get_float('statutory.nhf.rate')
for wages in (limit, limit + 1):
    seen = paye.calculate(wages, pension_contributing=True, nhf_contributing=True)
    print(f'wages of {wages:.0f} a year: exempt {seen["exempt"]}, tax {seen["annual_paye"]:.2f};',
          f'pension of employee and employer {seen["pension"]["employee"]:.0f} and',
          f'{seen["pension"]["employer"]:.0f}, by the rates {rates[0] * wages:.0f} and {rates[1] * wages:.0f};',
          f'housing fund {seen["nhf"]:.0f}, by the rate {fund * wages:.0f};',
          f'net a month {seen["net_monthly"]:.2f} of {seen["gross_monthly"]:.2f}')
told = paye.explain_calculate(limit, pension_contributing=True, nhf_contributing=True)
print(*[line for line in told['formula'] if 'deduction' in line], sep='\n')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

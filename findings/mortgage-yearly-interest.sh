#!/usr/bin/env bash
# The schedule of a loan that is not paid monthly charges a twelfth of the interest in mortgage.
#
# Packages: mortgage 1.0.5.
# Behaviour: Loan offers compounded='annually' and 'daily', and the payment is right for a payment a
#   year or a day. Each payment is then split with a twelfth of the yearly rate, whatever the period.
#   For one payment a year the first year of 100,000 at 6 % has an interest of 500 in place of 6,000,
#   and after ten payments the balance is -33,097. For one a day it is 1,692,010 in place of 0.
# Expected: interest of balance times rate divided by the number of periods, and a last balance of 0.
# Instead: keep to compounded='monthly'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mortgage==1.0.5'
cat > expected.txt <<'EXPECTED'
monthly: payment 1110.21, by hand 1110.21; first interest 500.00, by hand 500.00; total interest 33225, by hand 33225; last balance 0
annually: payment 13586.80, by hand 13586.80; first interest 500.00, by hand 6000.00; total interest 2771, by hand 35868; last balance -33097
daily: payment 36.44, by hand 36.44; first interest 500.00, by hand 16.44; total interest 1725000, by hand 32990; last balance 1692010
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from mortgage import Loan

for compounded, periods in (('monthly', 12), ('annually', 1), ('daily', 365)):
    loan = Loan(principal=100000, interest=0.06, term=10, compounded=compounded)
    rate, number = 0.06 / periods, 10 * periods
    payment = 100000 * rate / (1 - (1 + rate) ** -number)
    print(f'{compounded}: payment {float(loan.monthly_payment):.2f}, by hand {payment:.2f};',
          f'first interest {float(loan.schedule(1).interest):.2f}, by hand {100000 * rate:.2f};',
          f'total interest {float(loan.total_interest):.0f}, by hand {payment * number - 100000:.0f};',
          f'last balance {abs(float(loan.schedule(number).balance)) * (-1 if loan.schedule(number).balance < -1 else 1):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

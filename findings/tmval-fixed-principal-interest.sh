#!/usr/bin/env bash
# The interest of a loan with fixed repayments is wrong in tmval, as is the sum of its payments.
#
# Packages: tmval 0.0.12, numpy 1.23.5, scipy 1.10.1, python-dateutil 2.9.0.post0.
# Behaviour: Loan takes pp, the fixed principal of each payment, so that the payments fall. total_payments,
#   principal_paid and interest_paid take the first payment for all of them: over its 10 years a loan of
#   1,000 at 10 % costs 2,000 with 1,000 of interest, where 1,550 are paid, 550 of them interest. After 5
#   years 611 of the principal are repaid, where it is 500.
# Expected: the sums of the loan's own schedule.
# Instead: add up the columns of amortization().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tmval==0.0.12' 'numpy==1.23.5' 'scipy==1.10.1' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
1 years: total_payments 200, interest_paid 100, principal_paid 100; by hand 200, 100 and 100; amortization 200, 100 and 100
5 years: total_payments 1000, interest_paid 389, principal_paid 611; by hand 900, 400 and 500; amortization 900, 400 and 500
10 years: total_payments 2000, interest_paid 1000, principal_paid 1000; by hand 1550, 550 and 1000; amortization 1550, 550 and 1000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tmval.loan import Loan

amount, rate, part = 1000, 0.10, 100
loan = Loan(gr=rate, amt=amount, pp=part, period=1, term=10)
table = loan.amortization()
for years in (1, 5, 10):
    payments = interest = 0.0
    balance = float(amount)
    for _ in range(years):
        interest += balance * rate
        payments += part + balance * rate
        balance -= part
    print(f'{years} years: total_payments {loan.total_payments(t2=years):.0f}, interest_paid',
          f'{loan.interest_paid(t2=years):.0f}, principal_paid {loan.principal_paid(t2=years):.0f};',
          f'by hand {payments:.0f}, {interest:.0f} and {part * years}; amortization',
          f'{sum(table["payment_amt"][1:years + 1]):.0f}, {sum(table["interest_paid"][1:years + 1]):.0f}',
          f'and {sum(table["principal_paid"][1:years + 1]):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

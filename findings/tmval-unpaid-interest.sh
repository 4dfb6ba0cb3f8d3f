#!/usr/bin/env bash
# tmval forgives the interest of a payment that is too small, and lists it as paid.
#
# Packages: tmval 0.0.12, numpy 1.23.5, scipy 1.10.1, python-dateutil 2.9.0.post0.
# Behaviour: Loan.amortize_payments makes a table of payments that differ from the schedule. Where a payment
#   is less than the interest due, the rest of the interest is not added to the balance, and the column
#   interest_paid holds the interest due rather than the part that was paid: a payment of 200 is listed with
#   1000 of interest. olb_r of the same loan and payments gives a balance that is higher.
# Expected: a balance that grows by the interest left unpaid.
# Instead: use olb_r with the payments for the balance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tmval==0.0.12' 'numpy==1.23.5' 'scipy==1.10.1' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
year 1: payment 200, interest_paid 1000, balance 10000.00; by hand 10800.00, olb_r 10800.00
year 2: payment 3000, interest_paid 1000, balance 8000.00; by hand 8880.00, olb_r 8880.00
year 3: payment 0, interest_paid 800, balance 8000.00; by hand 9768.00, olb_r 9768.00
year 4: payment 4000, interest_paid 800, balance 4800.00; by hand 6744.80, olb_r 6744.80
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tmval.loan import Loan
from tmval.value import Payments

amount, rate = 10000, 0.10
payments = [200, 3000, 0.0, 4000]
loan = Loan(gr=rate, amt=amount, period=1, term=4)
table = loan.amortize_payments(Payments(amounts=payments, times=[1, 2, 3, 4]))
balance = float(amount)
for year, payment in enumerate(payments, 1):
    balance = balance * (1 + rate) - payment
    own = loan.olb_r(t=year, payments=Payments(amounts=payments[:year], times=list(range(1, year + 1)), gr=rate))
    print(f'year {year}: payment {payment:.0f}, interest_paid {table["interest_paid"][year]:.0f},',
          f'balance {table["remaining_balance"][year]:.2f}; by hand {balance:.2f}, olb_r {own:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

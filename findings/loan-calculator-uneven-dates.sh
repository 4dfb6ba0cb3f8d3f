#!/usr/bin/env bash
# The interest of loan-calculator is not the interest of its own balance unless all dates are evenly apart.
#
# Packages: loan-calculator 1.2.2.
# Behaviour: the progressive Price schedule is documented to charge interest over the last balance and
#   to use the rest of the payment as amortization. Interest and amortization are taken from the days
#   of the payments in reverse order instead, which is the same for equal periods only. A loan of 1000
#   that is paid back after 30, 60 and 400 days has a first interest of 40.90 in place of 9.36, and a
#   last one of 3.25 in place of 35.09, and calendar months are uneven, too. Both sums are right.
# Expected: interest of the balance before times the growth since the last payment.
# Instead: take the interest from the differences of the balances.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'loan-calculator==1.2.2'
cat > expected.txt <<'EXPECTED'
paid after [30, 60, 90] days: payment 339.59, balances [1000.0, 669.77, 336.44]
  interest [9.36, 6.27, 3.15], of the balances [9.36, 6.27, 3.15]; amortizations [330.23, 333.32, 336.44], by the balances [330.23, 333.32, 336.44]
paid after [31, 59, 90] days: payment 339.59, balances [1000.0, 670.08, 336.34]
  interest [9.36, 6.16, 3.25], of the balances [9.67, 5.85, 3.25]; amortizations [330.23, 333.43, 336.34], by the balances [329.92, 333.74, 336.34]
paid after [30, 60, 400] days: payment 350.20, balances [1000.0, 659.15, 315.12]
  interest [40.9, 6.46, 3.25], of the balances [9.36, 6.17, 35.09]; amortizations [309.3, 343.74, 346.96], by the balances [340.85, 344.04, 315.12]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, timedelta

from loan_calculator import Loan

start = date(2026, 1, 1)
for days in ([30, 60, 90], [31, 59, 90], [30, 60, 400]):
    loan = Loan(1000.0, 0.12, start, [start + timedelta(n) for n in days])
    growth = [(1 + loan.daily_interest_rate) ** (n - m) for n, m in zip(days, [0] + days[:-1])]
    interest = [balance * (g - 1) for balance, g in zip(loan.balance, growth)]
    show = lambda values: [round(value, 2) for value in values]
    print(f'paid after {days} days: payment {loan.due_payments[0]:.2f}, balances {show(loan.balance[:-1])}')
    print(f'  interest {show(loan.interest_payments)}, of the balances {show(interest)};',
          f'amortizations {show(loan.amortizations)}, by the balances',
          show(b - a for b, a in zip(loan.balance, loan.balance[1:])))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

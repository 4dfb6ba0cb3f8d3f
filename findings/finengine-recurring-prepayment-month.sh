#!/usr/bin/env bash
# finengine starts a recurring extra payment in the first month, whatever its month says.
#
# Packages: finengine 0.1.1.
# Behaviour: simulate_loan takes Prepayment(month, amount, recurring). Where recurring is true, the month is
#   not read: extra payments of 2,000 that begin in month 25 count from month 1, as do those that begin in
#   month 59 of a loan of 60 months, which would save next to nothing.
# Expected: the extra payments from the month named, as a plain schedule and single payments give.
# Instead: pass one Prepayment for each month.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'finengine==0.1.1'
cat > expected.txt <<'EXPECTED'
extra from month 1: repaid after 43 months, interest 70010; one by one 43 and 70010; by hand 43 and 70010
extra from month 25: repaid after 43 months, interest 70010; one by one 51 and 89862; by hand 51 and 89862
extra from month 59: repaid after 43 months, interest 70010; one by one 60 and 100380; by hand 60 and 100380
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from finengine import monthly_payment
from finengine.analytics import Prepayment, simulate_loan

principal, rate, months, extra = 300000, 12.0, 60, 2000
instalment = monthly_payment(principal, rate, months)
for first in (1, 25, 59):
    seen = simulate_loan(principal, rate, months, [Prepayment(first, extra, recurring=True)])
    single = simulate_loan(principal, rate, months,
                           [Prepayment(month, extra) for month in range(first, months + 1)])
    balance, interest, month = float(principal), 0.0, 0
    while balance > 0.5:
        month += 1
        due = balance * rate / 1200
        interest += due
        balance -= min(balance, instalment - due + (extra if month >= first else 0))
    print(f'extra from month {first}: repaid after {seen["actual_payoff_month"]} months, interest',
          f'{seen["total_interest_paid"]:.0f}; one by one {single["actual_payoff_month"]} and',
          f'{single["total_interest_paid"]:.0f}; by hand {month} and {interest:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

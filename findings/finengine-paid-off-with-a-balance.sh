#!/usr/bin/env bash
# finengine reports a loan as paid off while a balance is left.
#
# Packages: finengine 0.1.1.
# Behaviour: simulate_loan pays the rounded instalment in every month, the last one too, and reports
#   PAID_OFF. With the instalment rounded down, a balance is left that no month pays: 4.77 on a loan of
#   500,000 over 20 years. The principal that was paid is less than the principal of the loan.
# Expected: a last instalment that repays the balance, as amortize of the same package makes it.
# Instead: take the schedule of amortize where there are no extra payments, and check the last balance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'finengine==0.1.1'
cat > expected.txt <<'EXPECTED'
500000 at 13.5 % over 240 months: PAID_OFF after 240 months, 4.77 left, principal paid 499995.23; last instalment 6036.87, amortize 6041.64 with 0.00 left
250000 at 9.0 % over 120 months: PAID_OFF after 120 months, 0.84 left, principal paid 249999.16; last instalment 3166.89, amortize 3167.73 with 0.00 left
1000000 at 14.0 % over 360 months: PAID_OFF after 360 months, 0.00 left, principal paid 1000000.00; last instalment 11835.96, amortize 11835.96 with 0.00 left
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from finengine import amortize
from finengine.analytics import simulate_loan

for principal, rate, months in ((500000, 13.5, 240), (250000, 9.0, 120), (1000000, 14.0, 360)):
    seen = simulate_loan(principal, rate, months)
    plan = amortize(principal, rate, months)
    last, due = seen['schedule'][-1], plan.schedule[-1]
    print(f'{principal} at {rate} % over {months} months: {seen["status"]} after',
          f'{seen["actual_payoff_month"]} months, {last["remaining_balance"]:.2f} left,',
          f'principal paid {seen["total_principal_paid"]:.2f};',
          f'last instalment {last["payment"]:.2f}, amortize {due.payment:.2f} with {due.remaining_balance:.2f} left')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

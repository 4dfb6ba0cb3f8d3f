#!/usr/bin/env bash
# dscr-tools lets a new rate of an adjustable loan hold for one payment.
#
# Packages: dscr-tools 0.2.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: schedule takes {period: new rate} for loans with the method arm. arm_rate looks for the
#   very period, and returns the first rate for all others, so that a rate from month 13 on holds in
#   month 13 alone. The payment is never computed again; where the new interest exceeds it, the
#   principal is negative and the balance stays the same.
# Expected: the new rate until the next one, and a payment that repays the rest of the loan.
# Instead: give a rate for each period, and compute the payment by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dscr-tools==0.2.0' 'numpy==2.4.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
month 12: rate 4%, payment 4774.15, interest 3279.61, principal 1494.54, left 982389.64
month 13: rate 8%, payment 4774.15, interest 6549.26, principal -1775.11, left 984164.75
month 14: rate 4%, payment 4774.15, interest 3280.55, principal 1493.60, left 982671.14
month 24: rate 4%, payment 4774.15, interest 3230.01, principal 1544.14, left 967458.52
month 25: rate 9%, payment 4774.15, interest 7255.94, principal -2481.79, left 969940.31
month 26: rate 4%, payment 4774.15, interest 3233.13, principal 1541.02, left 968399.29
interest of the second year: 42359, by hand 78267 with a payment of 7269.15
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from dscrtools import LoanParams
from dscrtools.models.amortization import schedule

loan = LoanParams(
    loan_amount=1_000_000, interest_rate=0.04, amortization_years=30, loan_term_years=10,
    interest_method='arm', payments_per_year=12)
rows = schedule(loan, rate_adjustments={13: 0.08, 25: 0.09})
for row in rows:
    if row['period'] in (12, 13, 14, 24, 25, 26):
        print(f"month {row['period']}: rate {row['rate']:.0f}%, payment {row['payment']:.2f},",
              f"interest {row['interest']:.2f}, principal {row['principal']:.2f}, left {row['ending_balance']:.2f}")
balance = rows[11]['ending_balance']
rate, number = 0.08 / 12, 348
payment = balance * rate / (1 - (1 + rate) ** -number)
total = 0.0
for _ in range(12):
    total += balance * rate
    balance -= payment - balance * rate
print(f"interest of the second year: {sum(row['interest'] for row in rows[12:24]):.0f}, by hand {total:.0f}",
      f'with a payment of {payment:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

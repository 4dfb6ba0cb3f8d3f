#!/usr/bin/env bash
# finworth counts interest that was paid already as saved where a payment closes the loan.
#
# Packages: finworth 0.8.0.
# Behaviour: emi_prepayment_impact computes the interest that an extra payment saves. Where the payment
#   closes the loan, it returns the interest of the whole loan, whenever the payment is made: a loan of
#   5,000,000 over 20 years that is closed after 19 years saves 5,413,879, though 5,390,731 were paid
#   by then and 23,148 would have come. A payment after one year and one after ten save the same.
# Expected: the interest that was still to be paid.
# Instead: subtract the interest of the months before, from emi_amortization.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'finworth==0.8.0'
cat > expected.txt <<'EXPECTED'
closed after 12 months with 4900491: interest saved 5413879; 421183 of 5413879 was paid by then, 4992696 was left
closed after 120 months with 3499722: interest saved 5413879; 3706642 of 5413879 was paid by then, 1707237 was left
closed after 228 months with 497583: interest saved 5413879; 5390731 of 5413879 was paid by then, 23148 was left
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from finworth.emi import emi, emi_prepayment_impact

principal, rate, years = 5000000, 0.085, 20
loan = emi(principal, rate, years)
for month in (12, 120, 228):
    balance, paid = float(principal), 0.0
    for _ in range(month):
        interest = balance * rate / 12
        paid += interest
        balance -= loan['emi'] - interest
    seen = emi_prepayment_impact(principal, rate, years, balance + 0.01, prepay_after_months=month)
    print(f'closed after {month} months with {balance:.0f}: interest saved {seen["interest_saved"]};',
          f'{paid:.0f} of {loan["total_interest"]} was paid by then, {loan["total_interest"] - paid:.0f} was left')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

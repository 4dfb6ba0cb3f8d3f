#!/usr/bin/env bash
# A series of extra payments has one payment too few in mortgage-tools.
#
# Packages: mortgage-tools 0.0.3, pandas 2.3.3, numpy 2.4.6, matplotlib 3.10.7.
# Behaviour: apply_monthly_recurring_payment is documented to begin in start_month and to end in
#   end_month, by default the final month of the loan. The last month is left out, since it is the end
#   of a range: 100 extra in the months 13 to 24 are paid eleven times, and from month 12 to month 12
#   never. apply_ad_hoc_payment in month 12 is right.
# Expected: a payment in each month from start_month to end_month.
# Instead: give the month after the last one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mortgage-tools==0.0.3' 'pandas==2.3.3' 'numpy==2.4.6' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
100 extra from month 13 to 24: paid in 11 months, [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]; 12 were asked for
100 extra from month 1 to 3: paid in 2 months, [1, 2]; 3 were asked for
100 extra from month 12 to 12: paid in 0 months, []; 1 were asked for
once in month 12: [12]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from mortgage_tools.calculation import Loan

for start, end in ((13, 24), (1, 3), (12, 12)):
    loan = Loan(100000, 360, 0.06)
    plain = loan.standard_monthly_payment()
    loan.apply_monthly_recurring_payment(100, start, end)
    table = loan.amortization_table()
    months = [int(month) for month in table.index if table.payment[month] > plain + 50]
    print(f'100 extra from month {start} to {end}: paid in {len(months)} months, {months}; {end - start + 1} were asked for')
loan = Loan(100000, 360, 0.06)
loan.apply_ad_hoc_payment(100, 12)
print('once in month 12:', [int(m) for m, x in loan.amortization_table().payment.items() if x > plain + 50])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

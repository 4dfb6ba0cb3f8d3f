#!/usr/bin/env bash
# loanit counts payments where it asks for years.
#
# Packages: loanit 0.1.0.
# Behaviour: outstanding_principal_after(year), balance_after_year, outstanding_interest_after and
#   breakdown_of_year take a year. They look it up in a column "Year" that numbers the payments, so
#   that for monthly payments year 5 is month 5. Year 10 of a loan over ten years has most of the
#   loan left, and year 120 is accepted.
# Expected: the balance after year · payments_per_year payments.
# Instead: give the number of the payment.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'loanit==0.1.0'
cat > expected.txt <<'EXPECTED'
1 payments a year, owed after year 5: 68679, by hand 68679; in payment 5 68679
1 payments a year, owed after year 10: 0, by hand 0; in payment 10 0
4 payments a year, owed after year 5: 108607, by hand 68868; in payment 20 68868
4 payments a year, owed after year 10: 96334, by hand 0; in payment 40 0
12 payments a year, owed after year 5: 116302, by hand 68911; in payment 60 68911
12 payments a year, owed after year 10: 112511, by hand 0; in payment 120 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from loanit import Loan

for per_year in (1, 4, 12):
    loan = Loan(120000, 0.06, 10, payments_per_year=per_year)
    rate, number = 0.06 / per_year, 10 * per_year
    payment = 120000 * rate / (1 - (1 + rate) ** -number)
    for year in (5, 10):
        paid = year * per_year
        owed = 120000 * (1 + rate) ** paid - payment * ((1 + rate) ** paid - 1) / rate
        print(f'{per_year} payments a year, owed after year {year}: {loan.outstanding_principal_after(year):.0f},',
              f'by hand {abs(owed):.0f}; in payment {paid} {loan.outstanding_principal_after(paid):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

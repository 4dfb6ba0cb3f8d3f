#!/usr/bin/env bash
# mortgage reads the term of a loan in years whatever unit it is given.
#
# Packages: mortgage 1.0.5.
# Behaviour: Loan accepts term_unit='months' and 'days' and uses it in the printed summary only. A
#   loan of 36 months has 432 monthly payments: 68 in place of 365 a month, with 17,320 interest in
#   place of 1,142. Its summary says "Term: 36 months" and "Years to pay: 36.0".
# Expected: term payments for a term in months.
# Instead: give the term in years.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mortgage==1.0.5'
cat > expected.txt <<'EXPECTED'
3 years: 36 payments of 365.06, interest 1142.28, 3.0 years; by hand 36 of 365.06, interest 1142.28
36 months: 432 payments of 67.87, interest 17319.53, 36.0 years; by hand 36 of 365.06, interest 1142.28
120 months: 1440 payments of 60.05, interest 74465.72, 120.0 years; by hand 120 of 133.22, interest 3986.95
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from mortgage import Loan

for term, unit, months in ((3, 'years', 36), (36, 'months', 36), (120, 'months', 120)):
    loan = Loan(principal=12000, interest=0.06, term=term, term_unit=unit)
    payment = 12000 * 0.005 / (1 - 1.005 ** -months)
    print(f'{term} {unit}: {len(loan.schedule()) - 1} payments of {loan.monthly_payment}, interest {loan.total_interest},',
          f'{loan.years_to_pay} years; by hand {months} of {payment:.2f}, interest {payment * months - 12000:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

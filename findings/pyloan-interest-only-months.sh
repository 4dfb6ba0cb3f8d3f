#!/usr/bin/env bash
# pyloan counts the months without repayment of a loan in payments.
#
# Packages: pyloan 0.7.3, python-dateutil 2.9.0.post0.
# Behaviour: interest_only_period is documented as "The interest only period in months". It is
#   compared with the number of payments and lowered by one at each payment. For a quarterly loan,
#   12 is three years, for a yearly one twelve years: the first repayment of a loan of January 2024 is
#   in 2027 and in 2037 in place of 2025 and 2026, and the yearly loan costs 120,993 in place of
#   91,521 of interest.
# Expected: 12 months for any number of payments a year.
# Instead: give the number of payments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyloan==0.7.3' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
12 payments a year, 12 months without repayment: first repayment 2025-02, total interest 88592.25; after 12 payments 2025-02, 88592.25
4 payments a year, 12 months without repayment: first repayment 2027-04, total interest 93852.27; after 4 payments 2025-04, 89129.84
2 payments a year, 12 months without repayment: first repayment 2030-07, total interest 102265.25; after 2 payments 2025-07, 89903.42
1 payments a year, 12 months without repayment: first repayment 2037-01, total interest 120992.62; after 1 payments 2026-01, 91520.86
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from pyloan.pyloan import Loan

for per_year in (12, 4, 2, 1):
    def make(interest_only):
        return Loan(loan_amount=120000, interest_rate=6, loan_term=20, start_date='2024-01-31',
                    annual_payments=per_year, interest_only_period=interest_only)

    seen, right = make(12), make(12 * per_year // 12)
    first = [next(p.date for p in loan.get_payment_schedule()[1:] if p.principal_amount > 0) for loan in (seen, right)]
    print(f'{per_year} payments a year, 12 months without repayment: first repayment {first[0]:%Y-%m},',
          f'total interest {seen.get_loan_summary().total_interest_amount};',
          f'after {12 * per_year // 12} payments {first[1]:%Y-%m}, {right.get_loan_summary().total_interest_amount}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

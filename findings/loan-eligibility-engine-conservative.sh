#!/usr/bin/env bash
# The conservative mode of loan-eligibility-engine does not change how debts are judged.
#
# Packages: loan-eligibility-engine 1.0.0.
# Behaviour: RiskAssessor(conservative_mode=True) "applies stricter thresholds for all risk
#   calculations" and lowers the largest ratio of debt to income, MAX_DTI_RATIO, from 50 to 40 %.
#   This number is used nowhere: the score for debts is the same in both modes for each ratio, and
#   0.3 for 45 %, above the limit. Income, employment and age do not change either; only a loan of
#   3.5 to 5 times the income has another score.
# Expected: a lower score for debts above 40 %.
# Instead: check the ratio of debt to income before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'loan-eligibility-engine==1.0.0'
cat > expected.txt <<'EXPECTED'
largest ratio of debt to income: [50.0, 40.0]
debts of 35 %: score for debts [0.6, 0.6], for all [84.8, 84.8]
debts of 39 %: score for debts [0.6, 0.6], for all [84.8, 84.8]
debts of 41 %: score for debts [0.3, 0.3], for all [77.3, 77.3]
debts of 45 %: score for debts [0.3, 0.3], for all [77.3, 77.3]
debts of 49 %: score for debts [0.3, 0.3], for all [77.3, 77.3]
debts of 51 %: score for debts [0.1, 0.1], for all [72.2, 72.2]
loan of 3.2 times the income: [0.4, 0.4]
loan of 4 times the income: [0.4, 0.15]
loan of 6 times the income: [0.15, 0.15]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from loan_eligibility_engine import Applicant, LoanApplication, RiskAssessor
from loan_eligibility_engine.models import EmploymentType, LoanType

modes = RiskAssessor(), RiskAssessor(conservative_mode=True)
print('largest ratio of debt to income:', [mode.MAX_DTI_RATIO for mode in modes])
for debts in (35, 39, 41, 45, 49, 51):
    person = Applicant('A', 40, 60000, EmploymentType.SALARIED, 700, monthly_expenses=50 * debts, years_of_employment=6)
    loan = LoanApplication(person, LoanType.PERSONAL, 60000, 60)
    print(f'debts of {person.debt_to_income_ratio:.0f} %: score for debts {[mode.assess_debt_burden(person) for mode in modes]},',
          f'for all {[round(mode.calculate_risk_score(loan), 1) for mode in modes]}')
for ratio in (3.2, 4, 6):
    loan = LoanApplication(person, LoanType.HOME, 60000 * ratio, 240)
    print(f'loan of {ratio} times the income: {[mode.assess_loan_ratio(loan) for mode in modes]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

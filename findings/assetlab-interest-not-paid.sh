#!/usr/bin/env bash
# A deposit of assetlab that pays its interest out loses interest: on each deposit or withdrawal,
# and after the last end of a year.
#
# Packages: assetlab 0.1.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, pydantic 2.13.5, matplotlib
#   3.11.2.
# Behaviour: With payout_interest the interest is computed between all dates, and paid on dates
#   that end a calendar month, quarter or year, but only the part since the date before. Interest
#   until a replenishment within the month is in total_interest and is never paid. Nor is interest
#   after the last such date: of a year from June to June half is paid, and the deposit yields 6.5
#   % in place of 12 %.
# Expected: payments that add up to total_interest, the last one at the end of the deposit.
# Instead: add total_interest() less the payments to the last cash flow.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'pydantic==2.13.5' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'assetlab==0.1.0'
cat > expected.txt <<'EXPECTED'
calendar year, yearly: total_interest 12000.00, gain of the cash flow 12000.00, 12 % by hand 12000.00
June to June, yearly: total_interest 12032.88, gain of the cash flow 6542.47, 12 % by hand 12032.88
June to June, monthly: total_interest 12032.88, gain of the cash flow 11539.73, 12 % by hand 12032.88
calendar year, monthly, 1 more on each 15th: total_interest 12000.72, gain of the cash flow 6082.59, 12 % by hand 12000.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from assetlab import Deposit, Payment

def show(name, start, end, frequency, days=()):
    extra = [Payment(date=pd.Timestamp(day), amount=1.0) for day in days]
    deposit = Deposit(principal=100000, annual_rate=0.12, start_date=pd.Timestamp(start), end_date=pd.Timestamp(end),
                      interest_frequency=frequency, payout_interest=True, replenishments=extra or None)
    flows = deposit.to_cashflow()
    total = sum(payment.amount for payment in flows.payments)
    right = 100000 * 0.12 * (pd.Timestamp(end) - pd.Timestamp(start)).days / 365
    print(f'{name}: total_interest {deposit.total_interest():.2f}, gain of the cash flow {total:.2f}, 12 % by hand {right:.2f}')

show('calendar year, yearly', '2022-12-31', '2023-12-31', 1)
show('June to June, yearly', '2023-06-15', '2024-06-15', 1)
show('June to June, monthly', '2023-06-15', '2024-06-15', 12)
show('calendar year, monthly, 1 more on each 15th', '2022-12-31', '2023-12-31', 12, [f'2023-{m:02d}-15' for m in range(1, 13)])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

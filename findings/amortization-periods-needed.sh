#!/usr/bin/env bash
# amortization counts fewer payments than a loan needs.
#
# Packages: amortization 3.0.1.
# Behaviour: calculate_amortization_period(principal, rate, amount) is the "number of periods needed", and
#   rounds the exact number to the nearest one. In half of all cases that is one too few: after it
#   a part of the loan, up to half a payment, is still owed. A loan of 100 with payments of 70
#   and no interest has one period, after which 30 are owed.
# Expected: the next whole number, where the last payment is smaller.
# Instead: numpy_financial.nper, rounded up.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'amortization==3.0.1'
cat > expected.txt <<'EXPECTED'
150000 at 10%, 4900 a month: 35 periods, after which 2376.55 are owed; paid after 36
150000 at 10%, 4500 a month: 39 periods, after which 954.47 are owed; paid after 40
12000 at 5%, 850 a month: 15 periods, after which 0.00 are owed; paid after 15
100 at 0%, 70 a month: 1 periods, after which 30.00 are owed; paid after 2
payments from 4000 to 4999: too few periods for 489 of 1000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from amortization import calculate_amortization_period

short = 0
for principal, rate, amount in ((150000, 0.1, 4900), (150000, 0.1, 4500), (12000, 0.05, 850), (100, 0.0, 70)):
    periods = calculate_amortization_period(principal, rate, amount)
    balance, needed = principal, 0
    owed = None
    while balance > 0.005:
        balance = round(balance * (1 + rate / 12), 2) - amount
        needed += 1
        if needed == periods:
            owed = max(balance, 0)
    print(f'{principal} at {rate:.0%}, {amount} a month: {periods} periods,',
          f'after which {owed:.2f} are owed; paid after {needed}')
for amount in range(4000, 5000):
    periods = calculate_amortization_period(150000, 0.1, amount)
    balance = 150000.0
    for month in range(periods):
        balance = balance * (1 + 0.1 / 12) - amount
    short += balance > 1
print(f'payments from 4000 to 4999: too few periods for {short} of 1000')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# calcnook takes the yearly step-up of savings for a percentage, where it documents a fraction.
#
# Packages: calcnook 0.2.0.
# Behaviour: periodic_investment.calculate documents step_up_percent with "e.g. 0.10 means contribution
#   grows 10% each year", like its annual_return, where 0.12 is 12 %. The code divides it by 100: with 0.10
#   the payments grow by 0.1 % a year, and the future value is hardly more than without a step-up.
# Expected: payments that are 10 % higher each year.
# Instead: pass the percentage, 10 for 10 %.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'calcnook==0.2.0'
cat > expected.txt <<'EXPECTED'
e.g. 0.10 means contribution grows 10% each year. Default 0.0.
step_up_percent=0.0: paid 600000, future value 1161695
step_up_percent=0.1: paid 602707, future value 1165815
step_up_percent=10: paid 956245, future value 1687163
by hand with 10 % more each year: paid 956245, future value 1687163
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from calcnook.core import periodic_investment

amount, rate, years = 5000, 0.12, 10
print(*[line.strip() for line in periodic_investment.calculate.__doc__.splitlines()
        if 'grows 10%' in line])
for step in (0.0, 0.10, 10):
    seen = periodic_investment.calculate(amount, rate, years, step_up_percent=step)
    print(f'step_up_percent={step}: paid {seen.total_invested:.0f}, future value {seen.future_value:.0f}')
paid = value = 0.0
for month in range(12 * years):
    payment = amount * 1.10 ** (month // 12)
    paid += payment
    value = (value + payment) * (1 + rate / 12)
print(f'by hand with 10 % more each year: paid {paid:.0f}, future value {value:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

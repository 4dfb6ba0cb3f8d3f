#!/usr/bin/env bash
# A loan with extra payments is not paid back in downpyment where they should lower the instalment.
#
# Packages: downpyment 0.1.1, numpy 2.4.6, matplotlib 3.10.7.
# Behaviour: EarlyPayment with reduce='quota', the default, computes a new instalment for the rest of
#   the loan after each extra payment. It spreads what is left over the whole term again, 30 years,
#   and not over the payments that are left. After 20,000 extra in the 300th month the instalment falls
#   from 843 to 117, and 24,528 of 200,000 are owed at the end, without a message.
# Expected: an instalment that pays the loan back in the payments that are left.
# Instead: use reduce='term', or simulate a new loan for the rest.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'downpyment==0.1.1' 'numpy==2.4.6' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
20000 extra in each 120th month: instalment 843, then 559; owed after 30 years 41298, with the payments that are left 0
20000 extra in each 240th month: instalment 843, then 286; owed after 30 years 51496, with the payments that are left 0
20000 extra in each 300th month: instalment 843, then 117; owed after 30 years 24528, with the payments that are left 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from downpyment.interest import Interest
from downpyment.mortgage.mortgage import EarlyPayment, Mortgage

mortgage = Mortgage(property_price=200000, interest=Interest(rate=3.0), n_steps=30)
rate = 0.03 / 12
for month in (120, 240, 300):
    extra = EarlyPayment(amount=20000, pay_each=month, reduce='quota')
    seen = mortgage.simulate(early_payment=extra)
    owed, instalment = 200000.0, mortgage.initial_quota
    for step in range(1, 361):
        if step % month == 0:
            owed -= 20000
            instalment = owed * rate / (1 - (1 + rate) ** -(361 - step))
        owed -= instalment - owed * rate
    print(f'20000 extra in each {month}th month: instalment {seen.capital[month - 2] + seen.interest[month - 2]:.0f},',
          f'then {seen.capital[month - 1] + seen.interest[month - 1]:.0f}; owed after 30 years {seen.remaining[-1]:.0f},',
          f'with the payments that are left {abs(owed):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

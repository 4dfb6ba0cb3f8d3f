#!/usr/bin/env bash
# A temporary annuity of firstact whose payments are made at the end of the year costs more than one for
# life: 5.56 for twenty years and 4.91 for life, at 80.
#
# Packages: firstact 0.2.0, numpy 2.4.6, pandas 3.1.1.
# Behaviour: ax_temp_vencida(x, n) is the annuity whose payments are made at the beginning of the year,
#   discounted by a year. The payment of each year then goes to those who are alive at the beginning of it,
#   also to those who die before it is made: for one year it is v, as if nobody died. Its sister for life,
#   ax_vencida, leaves out the first payment, which is right.
# Expected: the sum of v**k kpx for k from 1 to n, with k lives of the same table, which is also the annuity
#   with n + 1 payments at the beginning less 1.
# Why it matters here: the error is 0.5 % at 40 and 12 % at 80, and has the sign that nobody checks: the
#   price is too high.
# Instead: ax_temp(x, n + 1) - 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'firstact==0.2.0' 'numpy==2.4.6' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
age 40, 20 years: summed 11.035, one more payment less 1 11.035, ax_temp_vencida 11.096; for life 13.817
age 65, 20 years: summed 8.536, one more payment less 1 8.536, ax_temp_vencida 8.904; for life 8.897
age 80, 20 years: summed 4.901, one more payment less 1 4.901, ax_temp_vencida 5.564; for life 4.905
age 80, 1 years: summed 0.868, one more payment less 1 0.868, ax_temp_vencida 0.943; for life 4.905
a payment of 1 in a year that does not depend on a life: 0.943
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from firstact import Annuity, MortalityTable

INTEREST = 0.06
table = MortalityTable.ilt()
annuity = Annuity(table, i=INTEREST)
for age, years in ((40, 20), (65, 20), (80, 20), (80, 1)):
    right = sum((1 + INTEREST)**-k * table.npx(k, age) for k in range(1, years + 1))
    print(f'age {age}, {years} years: summed {right:.3f}, one more payment less 1 '
          f'{annuity.ax_temp(age, years + 1) - 1:.3f}, ax_temp_vencida '
          f'{annuity.ax_temp_vencida(age, years):.3f}; for life {annuity.ax_vencida(age):.3f}')
print(f'a payment of 1 in a year that does not depend on a life: {1 / (1 + INTEREST):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

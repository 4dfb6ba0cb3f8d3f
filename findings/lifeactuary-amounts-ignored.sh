#!/usr/bin/env bash
# The increasing annuities certain of lifeActuary ignore their amounts: a first payment of 1000 that grows by
# 50 a year is worth 39 in place of 9304.
#
# Packages: lifeActuary 1.3.2, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: a decorator of Annuities_Certain checks the number of terms and calls the method with it alone.
#   Ian, Iaan, Iman and Imaan then use the defaults of the other arguments, 1 and 1. The geometric ones, Gan
#   to Gmaan, have another decorator.
# Expected: the present value of the payments that were asked for, as documented for payment and increase.
# Why it matters here: a level annuity, increase=0, is worth as much as an increasing one.
# Instead: payment * an(n) + increase * (Ian(n) - an(n)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lifeActuary==1.3.2' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
1, growing by 1: added up 39.37, from an and Ian 39.37, Ian 39.37, Iman 39.37
1000, growing by 50: added up 9304.34, from an and Ian 9304.34, Ian 39.37, Iman 39.37
1000, growing by 0: added up 7721.73, from an and Ian 7721.73, Ian 39.37, Iman 39.37
1000, growing by -100: added up 4556.53, from an and Ian 4556.53, Ian 39.37, Iman 39.37
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lifeActuary.annuities_certain import Annuities_Certain

YEARS = 10
annuity = Annuities_Certain(5, m=1)
for payment, increase in ((1, 1), (1000, 50), (1000, 0), (1000, -100)):
    right = sum((payment + increase * k) * 1.05**-(k + 1) for k in range(YEARS))
    combined = payment * annuity.an(YEARS) + increase * (annuity.Ian(YEARS) - annuity.an(YEARS))
    print(f'{payment}, growing by {increase}: added up {right:.2f}, from an and Ian {combined:.2f}, Ian '
          f'{annuity.Ian(YEARS, payment, increase):.2f}, Iman {annuity.Iman(YEARS, payment, increase):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The deferred increasing annuities of lifeActuary defer the first payment and not the increases: one that
# begins in twenty years costs 24 in place of 0.7.
#
# Packages: lifeActuary 1.3.2, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: annuities.t_nIax and t_nIaax add the level annuity, deferred, and one annuity for each increase,
#   deferred by its number only. The increases of a pension that begins at 65 are paid from 46 on. The class
#   CommutationFunctions has methods with the same names, which take the increases from another age and
#   defer them twice: they cost too little.
# Expected: the same sum, k + 1 after defer + k + 1 years for k from 0 to n - 1, if the person is alive.
# Why it matters here: without a deferral both are right, and with one they disagree.
# Instead: t_nIax(..., age + defer, defer=0) times nEx(..., n=defer), which discounts the annuity as a whole.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lifeActuary==1.3.2' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
deferred by 0 years: added up 30.24, discounted as a whole 30.24; t_nIax 30.24, of CommutationFunctions 30.24
deferred by 5 years: added up 17.14, discounted as a whole 17.14; t_nIax 27.64, of CommutationFunctions 13.18
deferred by 10 years: added up 8.09, discounted as a whole 8.09; t_nIax 25.77, of CommutationFunctions 3.09
deferred by 20 years: added up 0.67, discounted as a whole 0.67; t_nIax 24.06, of CommutationFunctions 0.21
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from lifeActuary import annuities
from lifeActuary.commutation_table import CommutationFunctions
from lifeActuary.mortality_table import MortalityTable

AGE, YEARS = 45, 10
deaths = [0] + [min(1.0, 0.0005 * np.exp(0.09 * age)) for age in range(86)]
table = MortalityTable('q', deaths)
commutation = CommutationFunctions(5, 0, 'q', deaths)


def add_up(defer):
    return sum((k + 1) * 1.05**-(defer + k + 1) * table.npx(AGE, defer + k + 1) for k in range(YEARS))


for defer in (0, 5, 10, 20):
    whole = annuities.t_nIax(table, AGE + defer, YEARS, 5) * annuities.nEx(table, AGE, 5, n=defer)
    print(f'deferred by {defer} years: added up {add_up(defer):.2f}, discounted as a whole {whole:.2f}; '
          f't_nIax {annuities.t_nIax(table, AGE, YEARS, 5, defer=defer):.2f}, '
          f'of CommutationFunctions {commutation.t_nIax(AGE, YEARS, defer=defer):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The temporary annuity of mortables with payments at the end of the year has one payment too few.
#
# Packages: mortables 0.1.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: annuity_immediate takes 1 from the annuity with payments at the beginning of the
#   year. That is right for life. For n years the payment at the beginning of the first year is
#   not made, and one at the end of the last year is. The value of one payment in a year is 0, of
#   ten payments from the age of 60 it is 7.9 in place of 8.6.
# Expected: the annuity-due less 1 plus the pure endowment of n years.
# Instead: annuity_due(table, age, rate, n) - 1 + pure_endowment(table, age, rate, n).
# Source: Bowers and others, Actuarial Mathematics, section 5.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'mortables==0.1.0'
cat > expected.txt <<'EXPECTED'
from 60 for life: 19.171, sum of the payments 19.171
from 60 for 1 years: 0.000, sum of the payments 0.975
from 60 for 2 years: 0.975, sum of the payments 1.925
from 60 for 10 years: 7.883, sum of the payments 8.635
from 85 for 5 years: 3.215, sum of the payments 3.830
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mortables
from mortables import life

table = mortables.get_table('TF0002')
for age, term in ((60, None), (60, 1), (60, 2), (60, 10), (85, 5)):
    seen = life.annuity_immediate(table, age, 0.02, term)
    years = range(1, (term or len(table.lx)) + 1)
    right = sum(table.lx[age + t] / table.lx[age] * 1.02 ** -t for t in years if age + t < len(table.lx))
    print(f'from {age} for {"life" if term is None else f"{term} years"}: {seen + 1e-9:.3f}, sum of the payments {right:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The change of a censored headcount in mpitb is one of a share among the poor.
#
# Packages: mpitb 0.2, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3.
# Behaviour: hdk is the share of all people who are poor and deprived in an indicator, and est
#   computes that. est_cot, for changes over time, takes the people who are deprived among the poor.
#   Where poverty falls from 40 to 20 % and all poor lack water, est has 0.40 and 0.20 and est_cot
#   a change of 0; where it falls and a larger share of fewer poor lacks school, est_cot has a rise.
# Expected: the difference of the two values of est.
# Instead: subtract the values of est.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mpitb==0.2' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
water: poor and deprived 0.40 in 2015 and 0.20 in 2020, difference -0.20, change by est_cot +0.00
school: poor and deprived 0.20 in 2015 and 0.15 in 2020, difference -0.05, change by est_cot +0.25
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import pandas as pd
from mpitb.core import MPIToolbox


def survey(year, poor, without_school):
    rows = [{'water': 1, 'fuel': 1, 'school': int(i < without_school), 'year': year} for i in range(poor)]
    return pd.DataFrame(rows + [{'water': 0, 'fuel': 0, 'school': 0, 'year': year}] * (100 - poor))


years = {2015: survey(2015, 40, 20), 2020: survey(2020, 20, 15)}
tool = MPIToolbox()
tool.set(name='index', dimensions=[(['water'], 'a'), (['fuel'], 'b'), (['school'], 'c')])
with contextlib.redirect_stdout(io.StringIO()):
    changes = tool.est_cot(pd.concat(years.values(), ignore_index=True), 'index', yearvar='year', klist=[50],
                           cotmeasures=['hdk'])
for indicator in ('water', 'school'):
    level = {year: next(row['b'] for row in tool.est(table.copy(), 'index', klist=[50])
                        if row['measure'] == 'hdk' and row['indicator'] == indicator) for year, table in years.items()}
    change = next(row['raw'] for row in changes if row['measure'] == f'hdk_{indicator}' and row['change_type'] == 'total')
    print(f'{indicator}: poor and deprived {level[2015]:.2f} in 2015 and {level[2020]:.2f} in 2020,',
          f'difference {level[2020] - level[2015]:+.2f}, change by est_cot {change:+.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

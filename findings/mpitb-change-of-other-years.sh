#!/usr/bin/env bash
# The standard error of a change in mpitb falls with each other year in the table.
#
# Packages: mpitb 0.2, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3.
# Behaviour: est_cot tests the change of the poverty headcount between the first and the last year.
#   Its standard error divides both variances by the number of people of all years. With 500 people in
#   each of two years it is 0.020 in place of 0.029, and with four years between them, which the
#   change does not depend on, 0.012: a fall from 30 to 27 % then has a p-value of 0.01 in place of
#   0.29.
# Expected: the people of each of the two years below the variance of that year.
# Instead: multiply the error by the root of the number of years.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mpitb==0.2' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
2015 and 2020: change from 2015 to 2020 -0.030, standard error 0.0202, p-value 0.137; by hand 0.0285, 0.293
all six years: change from 2015 to 2020 -0.030, standard error 0.0116, p-value 0.010; by hand 0.0285, 0.293
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from mpitb.core import MPIToolbox
from scipy.stats import norm


def survey(year, poor):
    deprived = (np.arange(500) < poor).astype(int)
    return pd.DataFrame({'school': deprived, 'water': deprived, 'year': year})


first, last = survey(2015, 150), survey(2020, 135)
for name, years in (('2015 and 2020', [first, last]),
                    ('all six years', [first] + [survey(year, 150) for year in range(2016, 2020)] + [last])):
    tool = MPIToolbox()
    tool.set(name='index', dimensions=[(['school'], 'education'), (['water'], 'living')])
    with contextlib.redirect_stdout(io.StringIO()):
        rows = tool.est_cot(pd.concat(years, ignore_index=True), 'index', yearvar='year', klist=[50], cotmeasures=['H'])
    row = next(row for row in rows if row['change_type'] == 'total')
    error = np.sqrt(0.30 * 0.70 / 500 + 0.27 * 0.73 / 500)
    print(f'{name}: change from 2015 to 2020 {row["raw"]:.3f}, standard error {row["se"]:.4f}, p-value {row["pval"]:.3f};',
          f'by hand {error:.4f}, {2 * norm.sf(abs(row["raw"]) / error):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

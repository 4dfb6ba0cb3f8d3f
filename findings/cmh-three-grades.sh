#!/usr/bin/env bash
# CMH's test is wrong for tables with more than two rows and columns.
#
# Packages: CMH 1.0.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3.
# Behaviour: CMH_numpy follows R's mantelhaen.test, which lists the cells of a table by columns. The
#   differences from the expected counts are listed by rows here, and the covariances, a Kronecker
#   product, by columns as in R. Where both variables have two values, or one of them has, there is
#   nothing to exchange. Otherwise each difference is weighed with the variance of another cell, and
#   the result depends on which variable is called the outcome.
# Expected: for one stratum (n - 1) / n times the chi-square of Pearson; the same result if the
#   variables are exchanged; a p-value below 0.05 in 5 % of unrelated tables.
# Instead: reshape the transposed table, m.T.reshape(-1), as R does.
# Source: Agresti, Categorical Data Analysis, 2002, page 295, the source of the package.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'CMH==1.0.1'
cat > expected.txt <<'EXPECTED'
2 x 2: 0.01, exchanged 0.01; by Pearson 0.01
2 x 4: 4.40, exchanged 4.40; by Pearson 4.40
3 x 3: 8.08, exchanged 8.08; by Pearson 8.87
3 x 4: 32.25, exchanged 20.63; by Pearson 19.86
2 x 2, unrelated: p-value below 0.05 in 5 %, by Pearson in 5 %
3 x 3, unrelated: p-value below 0.05 in 21 %, by Pearson in 5 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from cmh.cmh import CMH_numpy
from scipy.stats import chi2, chi2_contingency

draw = np.random.RandomState(0)
for rows, columns in ((2, 2), (2, 4), (3, 3), (3, 4)):
    table = draw.randint(5, 40, size=(rows, columns)).astype(float)
    n = table.sum()
    right = (n - 1) / n * chi2_contingency(table, correction=False)[0]
    seen, exchanged = (CMH_numpy(t[:, :, None])[0] for t in (table, table.T))
    print(f'{rows} x {columns}: {seen:.2f}, exchanged {exchanged:.2f}; by Pearson {right:.2f}')
for rows in (2, 3):
    share = np.array([0.8, 0.15, 0.05])[:rows] / sum([0.8, 0.15, 0.05][:rows])
    equal = np.full(rows, 1 / rows)
    rejected = np.zeros(2)
    for _ in range(2000):
        table = draw.multinomial(300, np.outer(share, equal).ravel()).reshape(rows, rows).astype(float)
        n = table.sum()
        right = (n - 1) / n * chi2_contingency(table, correction=False)[0]
        rejected += [CMH_numpy(table[:, :, None])[2] < 0.05, chi2.sf(right, (rows - 1) ** 2) < 0.05]
    print(f'{rows} x {rows}, unrelated: p-value below 0.05 in {rejected[0] / 20:.0f} %,',
          f'by Pearson in {rejected[1] / 20:.0f} %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

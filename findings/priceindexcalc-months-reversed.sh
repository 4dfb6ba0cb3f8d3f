#!/usr/bin/env bash
# The multilateral indices of PriceIndexCalc belong to other months where the newest rows come first.
#
# Packages: PriceIndexCalc 0.7, pandas 1.5.3, numpy 1.26.4, scipy 1.15.3, scikit-learn 1.6.1,
#   statsmodels 0.14.4, seaborn 0.13.2.
# Behaviour: the time product dummy index sorts the months for its regression and labels its
#   coefficients with the months in the order of the table. Where prices rise by 10 points a month and
#   the newest rows come first, the index begins at 1.3 and falls to 1.0. The GEKS index is 1 in the
#   last month, though reference_month=1 is documented as the reference. The Geary-Khamis index is
#   right.
# Expected: 1.0, 1.1, 1.2 and 1.3 in any order of the rows.
# Instead: sort the table by month first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PriceIndexCalc==0.7' 'pandas==1.5.3' 'numpy==1.26.4' 'scipy==1.15.3' 'scikit-learn==1.6.1' 'statsmodels==0.14.4' 'seaborn==0.13.2'
cat > expected.txt <<'EXPECTED'
tpd, oldest first: 2025-01 1.000, 2025-02 1.100, 2025-03 1.200, 2025-04 1.300
tpd, newest first: 2025-01 1.300, 2025-02 1.200, 2025-03 1.100, 2025-04 1.000
geks, oldest first: 2025-01 1.000, 2025-02 1.100, 2025-03 1.200, 2025-04 1.300
geks, newest first: 2025-01 0.769, 2025-02 0.846, 2025-03 0.923, 2025-04 1.000
gk, oldest first: 2025-01 1.000, 2025-02 1.100, 2025-03 1.200, 2025-04 1.300
gk, newest first: 2025-01 1.000, 2025-02 1.100, 2025-03 1.200, 2025-04 1.300
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from PriceIndexCalc.pandas_modules.index_methods import multilateral_methods

table = pd.DataFrame({
    'month': np.repeat(['2025-01', '2025-02', '2025-03', '2025-04'], 2),
    'id': ['bread', 'milk'] * 4,
    'price': [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3],
    'quantity': 1.0,
})
for method in ('tpd', 'geks', 'gk'):
    for name, rows in (('oldest first', table), ('newest first', table.iloc[::-1].reset_index(drop=True))):
        index = multilateral_methods(rows.copy(), method=method, reference_month=1).iloc[:, 0]
        print(f'{method}, {name}:', ', '.join(f'{month} {value:.3f}' for month, value in index.items()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

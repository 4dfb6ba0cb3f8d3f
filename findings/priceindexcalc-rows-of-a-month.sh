#!/usr/bin/env bash
# The price indices of PriceIndexCalc compare prices of different products.
#
# Packages: PriceIndexCalc 0.7, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3, scikit-learn 1.6.1,
#   statsmodels 0.14.4, seaborn 0.13.2.
# Behaviour: bilateral_methods takes a table with a column of products. It keeps the products that
#   both months have and then divides prices row by row, in the order of the table. Where a month has
#   its rows in another order, bread is compared with a car: all three prices rise by 10 %, and the
#   Laspeyres index is 108, the Carli index 3667. The Törnqvist index finds a fall of 20 %.
# Expected: prices that are matched by the product, whose column is given for that.
# Instead: sort the table by month and product before the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PriceIndexCalc==0.7' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3' 'scikit-learn==1.6.1' 'statsmodels==0.14.4' 'seaborn==0.13.2'
cat > expected.txt <<'EXPECTED'
the same rows in another order: True
jevons: 1.100, in another order 1.100; each price rises by 10 %
carli: 1.100, in another order 3667.400; each price rises by 10 %
laspeyres: 1.100, in another order 108.385; each price rises by 10 %
tornqvist: 1.100, in another order 0.802; each price rises by 10 %
walsh: 1.100, in another order 1.100; each price rises by 10 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from PriceIndexCalc.pandas_modules.index_methods import bilateral_methods

table = pd.DataFrame({
    'month': ['2025-01'] * 3 + ['2025-02'] * 3,
    'id': ['bread', 'milk', 'car'] * 2,
    'price': [2.0, 1.0, 20000.0, 2.2, 1.1, 22000.0],
    'quantity': [100.0, 100.0, 1.0] * 2,
})
other = table.iloc[[0, 1, 2, 5, 3, 4]].reset_index(drop=True)
print('the same rows in another order:', table.sort_values(['month', 'id']).reset_index(drop=True).equals(
    other.sort_values(['month', 'id']).reset_index(drop=True)))
for method in ('jevons', 'carli', 'laspeyres', 'tornqvist', 'walsh'):
    index = [bilateral_methods(x.copy(), method=method).index_value.iloc[1] for x in (table, other)]
    print(f'{method}: {index[0]:.3f}, in another order {index[1]:.3f}; each price rises by 10 %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

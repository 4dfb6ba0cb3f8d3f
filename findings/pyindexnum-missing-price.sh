#!/usr/bin/env bash
# A missing price counts as 0 in the weighted mean price of pyindexnum.
#
# Packages: pyindexnum 0.4.0, polars 1.37.1, numpy 1.26.4.
# Behaviour: aggregate_time with 'weighted_arithmetic' sums price times quantity, which leaves a row with a
#   missing price out, and divides by the sum of all quantities, which keeps it: two sales at 100 and one
#   without a price give a mean of 66.67. The other means of the function return nothing for such a product,
#   or 100. The mean is below every price that was seen.
# Expected: 100, or nothing, as the other means give.
# Instead: drop the rows without a price first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyindexnum==0.4.0' 'polars==1.37.1' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
arithmetic: full 100.00 gap 100.00
geometric: full 100.00 gap None
harmonic: full 100.00 gap None
weighted_arithmetic: full 100.00 gap 66.67
weighted_geometric: full 100.00 gap None
weighted_harmonic: full 100.00 gap None
by hand over the rows with a price: 100.00; lowest price 100.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import polars as pl
from pyindexnum import aggregate_time

sales = pl.DataFrame({'date': ['2025-01-03', '2025-01-10', '2025-01-17'] * 2,
                      'product_id': ['full'] * 3 + ['gap'] * 3,
                      'price': [100.0, 100.0, 100.0, 100.0, None, 100.0], 'quantity': [10, 10, 10, 10, 10, 10]})
for kind in ('arithmetic', 'geometric', 'harmonic', 'weighted_arithmetic', 'weighted_geometric', 'weighted_harmonic'):
    seen = aggregate_time(sales, quantity_col='quantity', agg_type=kind).sort('product_id')
    print(f'{kind}:', *[f'{name} {price if price is None else format(price, ".2f")}'
                        for name, price in zip(seen['product_id'], seen['aggregated_price'])])
known = sales.filter(pl.col('price').is_not_null() & (pl.col('product_id') == 'gap'))
paid = (known['price'] * known['quantity']).sum() / known['quantity'].sum()
print(f'by hand over the rows with a price: {paid:.2f}; lowest price {known["price"].min():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

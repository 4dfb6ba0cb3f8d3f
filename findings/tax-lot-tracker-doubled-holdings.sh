#!/usr/bin/env bash
# tax-lot-tracker doubles the holdings each time that it recalculates.
#
# Packages: tax-lot-tracker 0.1.0, python-dateutil 2.9.0.post0.
# Behaviour: recalculate_all sets the lots back to their first amounts and processes all transactions again. The
#   purchases make their lots a second time beside those that were kept: of 4 bought and 1 sold, 7 are held
#   after one recalculation and 11 after two. Documented is "Wipe disposals, reset lots, and reprocess all
#   transactions in order". The sales then find lots that were never bought.
# Expected: 3 held, however often it is computed.
# Instead: start from a new database with the transactions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tax-lot-tracker==0.1.0' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
0 recalculations: 2 lots with 3 held at a cost of 400; by hand 3 and 400
1 recalculations: 4 lots with 7 held at a cost of 900; by hand 3 and 400
2 recalculations: 6 lots with 11 held at a cost of 1400; by hand 3 and 400
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime
from decimal import Decimal

from tax_lot_tracker.database import Database
from tax_lot_tracker.engine import CostBasisEngine
from tax_lot_tracker.models import Transaction

trades = [('buy', datetime(2024, 1, 10), 2, 100), ('buy', datetime(2024, 3, 10), 2, 150),
          ('sell', datetime(2024, 6, 10), 1, 200)]
with Database('lots.db') as database:
    engine = CostBasisEngine(database)
    for kind, day, amount, price in trades:
        trade = Transaction(timestamp=day, type=kind, asset='BTC', amount=Decimal(amount), price_usd=Decimal(price))
        database.add_transaction(trade)
        engine.process_transaction(trade)
    hand = sum(amount if kind == 'buy' else -amount for kind, _, amount, _ in trades)
    for count in range(3):
        if count:
            engine.recalculate_all()
        lots = database.get_all_lots()
        print(f'{count} recalculations: {len(lots)} lots with {float(sum(lot.amount for lot in lots)):g} held at a cost',
              f'of {float(sum(lot.cost_basis_usd for lot in lots)):.0f}; by hand {hand} and {2 * 100 + 2 * 150 - 100}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# capital-gains finds no wash sale where the lots have no name.
#
# Packages: capital-gains 1.0.8.
# Behaviour: the names of lots are optional, and wash sales are handled by default. A lot can take the loss of a
#   sale only if its name differs from the name of the lot sold: where both have none, the test fails. A loss
#   with the same shares bought eight days later is realised in full, and with names "a" and "b" it is moved
#   to the cost of the new lot.
# Expected: the same gains with and without names.
# Instead: give each purchase its own name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'capital-gains==1.0.8'
cat > expected.txt <<'EXPECTED'
names ('', '') : gains -1000 1800 loss moved 0 0 ; by the rule of 30 days 0 and 800
names ('a', 'b') : gains 0 800 loss moved 1000 0 ; by the rule of 30 days 0 and 800
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from capital_gains.loader import load_transactions
from capital_gains.logic import process_sales

for names in (('', ''), ('a', 'b')):
    with open('trades.csv', 'w') as file:
        print('date,symbol,name,shares,price,fee', f'2025-01-10,AAA,{names[0]},100,50,', '2025-06-02,AAA,,-100,40,',
              f'2025-06-10,AAA,{names[1]},100,42,', '2025-12-01,AAA,,-100,60,', sep='\n', file=file)
    lots, sales = load_transactions('trades.csv')
    seen = process_sales(lots['AAA'], sales['AAA'], True)
    loss = 100 * 50 - 100 * 40
    print('names', names, ': gains', *[f'{float(lot.gain):.0f}' for lot in seen], 'loss moved',
          *[f'{float(lot.wash_sale):.0f}' for lot in seen], '; by the rule of 30 days 0 and',
          100 * 60 - (100 * 42 + loss))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

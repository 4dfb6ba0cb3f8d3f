#!/usr/bin/env bash
# cad-capgains misses the superficial loss of a sale in December where the shares are bought back in January.
#
# Packages: cad-capgains 2.0.2, click 7.1.2, tabulate 0.8.10.
# Behaviour: the README says that a loss is superficial where the same shares were bought "30 days before or 30
#   days after the sale" and some are held at the end of that window. calc leaves out all transactions after
#   the year that it is asked for, and so does not see a purchase in January: the loss of December stays in
#   the gains of the year. The calculation of the next year treats the sale as superficial, and raises the
#   cost of the shares by the loss, so that it counts twice.
# Expected: no loss in December, as for a purchase within the same year.
# Instead: add a purchase of January to the file of December under its last day.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cad-capgains==2.0.2' 'click==7.1.2' 'tabulate==0.8.10'
cat > expected.txt <<'EXPECTED'
all within the year: gains of 2018 0 and of 2019 800, together 800; by the rule 0 and 800; money received less paid 800
bought back in January: gains of 2018 -1000 and of 2019 800, together -200; by the rule 0 and 800; money received less paid 800
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from capgains.commands.capgains_calc import calculate_gains
from capgains.transactions_reader import TransactionsReader

for name, sold, back in (('all within the year', '2018-11-20', '2018-12-10'),
                         ('bought back in January', '2018-12-20', '2019-01-09')):
    with open('trades.csv', 'w') as file:
        print(f'2018-02-01,first,AAA,BUY,100,50.00,0.00,CAD\n{sold},loss,AAA,SELL,100,40.00,0.00,CAD\n'
              f'{back},back,AAA,BUY,100,42.00,0.00,CAD\n2019-06-03,last,AAA,SELL,100,60.00,0.00,CAD', file=file)
    trades = TransactionsReader.get_transactions('trades.csv')
    gains = {}
    for year in (2018, 2019):
        gains[year] = sum(float(trade.capital_gain) for trade in calculate_gains(trades, year, 'AAA'))
    kept = 100 * 40 - 100 * 50
    print(f'{name}: gains of 2018 {gains[2018]:.0f} and of 2019 {gains[2019]:.0f}, together',
          f'{sum(gains.values()):.0f}; by the rule 0 and {100 * 60 - 100 * 42 + kept:.0f};',
          f'money received less paid {100 * (40 + 60 - 50 - 42)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# ledger-cli-toolkit gives a posting without an amount the last amount with the opposite sign, and not what balances the
# transaction: of purchases of 30 and 20 dollars from one account it takes 20.
#
# Packages: ledger-cli-toolkit 1.8.6, tabulate 0.9.0, pyyaml 6.0.2, pandas 2.3.3, numpy 2.4.6, matplotlib
#   3.11.2, python-dateutil 2.9.0.
# Behaviour: ledger, whose files it reads, allows one posting of a transaction to have no amount, which is then minus the sum
#   of the others. With two postings both rules are equal. With three the transaction does not add up to 0, and
#   the balance of the account is too high, without a message.
# Expected: -50 dollars, and balances whose sum is 0.
# Why it matters here: a receipt with several categories is the usual case.
# Instead: write all amounts.
# Source: ledger manual, "Eliding amounts": one posting may leave out its amount, which balances the transaction.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tabulate==0.9.0' 'pyyaml==6.0.2' 'pandas==2.3.3' 'numpy==2.4.6' 'matplotlib==3.11.2' 'python-dateutil==2.9.0.post0' 'ledger-cli-toolkit==1.8.6'
cat > expected.txt <<'EXPECTED'
Salary: {'Assets:Bank': 3000.0, 'Income:Salary': -3000.0}, sum 0
Shopping: {'Expenses:Food': 30.0, 'Expenses:Household': 20.0, 'Assets:Bank': -20.0}, sum 30
Pharmacy: {'Expenses:Health': 80.0, 'Expenses:Food': 5.0, 'Assets:Bank': -5.0}, sum 80
bank: 2975, by the rule of ledger 2865
sum of all balances: 110, by the rule of ledger 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ledger_cli.ledger import LedgerParser

TEXT = """2026/11/01 * Salary
    Assets:Bank          $ 3000.00
    Income:Salary

2026/11/02 * Shopping
    Expenses:Food        $ 30.00
    Expenses:Household   $ 20.00
    Assets:Bank

2026/11/03 * Pharmacy
    Expenses:Health      $ 80.00
    Expenses:Food        $ 5.00
    Assets:Bank
"""
with open('journal.ledger', 'w') as file:
    file.write(TEXT)
parser = LedgerParser('journal.ledger')
transactions = parser.parse_transactions()
for transaction in transactions:
    amounts = {posting['account']: posting['amount'] for posting in transaction['accounts']}
    print(f'{transaction["description"]}: {amounts}, sum {sum(amounts.values()):.0f}')
balances = parser.calculate_balances(transactions)
print(f'bank: {balances["Assets:Bank"]["$"]:.0f}, by the rule of ledger {3000 - 50 - 85}')
print(f'sum of all balances: {sum(x["$"] for x in balances.values()):.0f}, by the rule of ledger 0')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

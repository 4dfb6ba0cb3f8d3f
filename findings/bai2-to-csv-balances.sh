#!/usr/bin/env bash
# bai2-to-csv leaves the balances out of the summary that it makes of a BAI2 file, and puts the customer's
# reference of a payment into the column of the bank's, and its text into the column of the customer's.
#
# Packages: bai2-to-csv 0.1.0, bai2 0.15.0, pandas 2.3.3, numpy 2.4.6, pydantic 2.12.5.
# Behaviour: the account record of BAI2 names the account and lists balances and totals, four fields each,
#   which may continue in records 88. bai2-to-csv keeps the account of the record and the first total of
#   each record 88: of an opening balance, a closing balance and two totals, one total is left. Of a
#   payment it takes the last two fields of the line as the two references; a line ends with the text of
#   the payment, in which commas are allowed. What follows a comma in the text is lost.
# Expected: as the package bai2 reads the same file.
# Why it matters here: the reference links a payment to a person, and here it is text that many share.
# Instead: the package bai2.
# Source: the BAI2 specification (Cash Management Balance Reporting, version 2): record 03 holds type,
#   amount, count and funds type for each total, record 16 ends with bank reference, customer reference
#   and text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bai2-to-csv==0.1.0' 'bai2==0.15.0' 'pandas==2.3.3' 'numpy==2.4.6' 'pydantic==2.12.5'
cat > expected.txt <<'EXPECTED'
bai2, totals: {'010': 500000, '015': 412345, '100': 100000, '400': 187655}
bai2-to-csv, totals: {'100': '100000'}
100000: bai2 bank B100, customer C200, text SMITH, CLINIC, INVOICE 7
    bai2-to-csv bank CLINIC, customer INVOICE 7, text none
87655: bai2 bank B101, customer C201, text RENT
    bai2-to-csv bank C201, customer RENT, text none
100000: bai2 bank B102, customer C202, text DEVICES
    bai2-to-csv bank C202, customer DEVICES, text none
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from bai2 import bai2
from bai2_to_csv import Bai2Converter

TEXT = """01,122099999,123456789,261127,0800,1,80,1,2/
02,031001234,122099999,1,261126,,EUR,2/
03,4711,EUR,010,500000,,,015,412345,,/
88,100,100000,1,,400,187655,2,/
16,175,100000,Z,B100,C200,SMITH, CLINIC, INVOICE 7
16,475,87655,Z,B101,C201,RENT
16,475,100000,Z,B102,C202,DEVICES
49,1487655,6/
98,1487655,1,8/
99,1487655,1,10/
"""
with open('statement.bai', 'w') as file:
    file.write(TEXT)
totals, payments = Bai2Converter().convert_to_dataframes('statement.bai')
with open('statement.bai') as file:
    account = bai2.parse_from_file(file).children[0].children[0]
print('bai2, totals:', {item.type_code.code: item.amount for item in account.header.summary_items})
print('bai2-to-csv, totals:', dict(zip(totals.transaction_bai_code, totals.amount)))
for row, line in zip(payments.itertuples(), account.children):
    print(f'{line.amount}: bai2 bank {line.bank_reference}, customer {line.customer_reference}, '
          f'text {line.text}')
    print(f'    bai2-to-csv bank {row.bank_reference}, customer {row.customer_reference}, '
          f'text {row.transaction_text or "none"}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# swiftlib writes each amount of a payment with two decimals, whatever the currency: 12.345 Kuwaiti dinars are ordered as
# 12.34 or 12.35, and the sum of the file is another one than the payment.
#
# Packages: swiftlib 1.0.1, lxml 6.0.2, pydantic 2.12.5.
# Behaviour: ISO 4217 gives the dinars of Bahrain, Kuwait, Jordan and Tunisia three decimals and the yen none. The
#   generator of pain.001 formats all of them with .2f. The MT103 that was converted has the third decimal.
# Expected: 12.345 KWD and 1000 JPY, or an error. Too many decimals for a currency are an error of the scheme,
#   too few change the money.
# Instead: write the amounts of the XML by hand.
# Source: ISO 4217, minor units.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'swiftlib==1.0.1' 'lxml==6.0.2' 'pydantic==2.12.5'
cat > expected.txt <<'EXPECTED'
12.34 EUR, with 2 decimals: ordered 12.34 EUR
12.345 KWD, with 3 decimals: ordered 12.34 KWD
0.005 BHD, with 3 decimals: ordered 0.00 BHD
999.999 TND, with 3 decimals: ordered 1000.00 TND
1000 JPY, with 0 decimals: ordered 1000.00 JPY
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import re
from datetime import date
from decimal import Decimal

from swiftlib.converters.mt_to_iso import MT103ToPain001Converter
from swiftlib.mt.messages.mt103 import MT103Builder

DECIMALS = {'EUR': 2, 'KWD': 3, 'BHD': 3, 'TND': 3, 'JPY': 0}
for currency, amount in (('EUR', '12.34'), ('KWD', '12.345'), ('BHD', '0.005'), ('TND', '999.999'), ('JPY', '1000')):
    payment = (MT103Builder().transaction_reference('FT1').bank_operation_code('CRED')
               .value_date_currency_amount(date(2026, 11, 30), currency, Decimal(amount))
               .ordering_customer('/DE89370400440532013000', 'JANE DOE', ['BERLIN'])
               .beneficiary('/98765432', 'JOHN SMITH', ['ELSEWHERE']).charges('SHA').build())
    xml = MT103ToPain001Converter().convert(payment).to_xml()
    xml = xml.decode() if isinstance(xml, bytes) else xml
    seen = re.search(r'<InstdAmt Ccy="(\w+)">([^<]*)<', xml)
    print(f'{amount} {currency}, with {DECIMALS[currency]} decimals: ordered {seen[2]} {seen[1]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

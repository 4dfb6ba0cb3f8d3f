#!/usr/bin/env bash
# pycamt reads the amount in which a payment was ordered as the amount that was booked, and keeps the currency of the
# account: 110 US dollars that cost 100 euros are 110 euros.
#
# Packages: pycamt 1.1.1, lxml 6.0.2.
# Behaviour: the amount of an entry is overwritten by the first amount inside of its details. In camt.053 the first one is
#   the instructed amount, where the order and the account have different currencies; the amount of the
#   transaction in the currency of the account follows it. The currency stays the one of the entry. The sum of the
#   entries is then not the difference of the balances.
# Expected: 100 EUR: the amount of the entry, or TxAmt of the details.
# Instead: read Ntry/Amt by hand.
# Source: ISO 20022, camt.053.001.02: AmtDtls holds InstdAmt (the amount before charges and exchange, in the currency that
#   was ordered) and TxAmt.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pycamt==1.1.1' 'lxml==6.0.2'
cat > expected.txt <<'EXPECTED'
balances 1000.00 and 850.00
paid 110.00 EUR
paid 50.00 EUR
sum 160.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from pycamt.parser import Camt053Parser

def balance(code, amount):
    return (f'<Bal><Tp><CdOrPrtry><Cd>{code}</Cd></CdOrPrtry></Tp><Amt Ccy="EUR">{amount}</Amt>'
            '<CdtDbtInd>CRDT</CdtDbtInd><Dt><Dt>2026-11-30</Dt></Dt></Bal>')

def entry(amount, details):
    return (f'<Ntry><Amt Ccy="EUR">{amount}</Amt><CdtDbtInd>DBIT</CdtDbtInd><Sts>BOOK</Sts>'
            '<BookgDt><Dt>2026-11-30</Dt></BookgDt><ValDt><Dt>2026-11-30</Dt></ValDt>'
            f'<BkTxCd/><NtryDtls><TxDtls>{details}</TxDtls></NtryDtls></Ntry>')

dollars = ('<AmtDtls><InstdAmt><Amt Ccy="USD">110.00</Amt></InstdAmt>'
           '<TxAmt><Amt Ccy="EUR">100.00</Amt></TxAmt></AmtDtls>')
text = ('<Document xmlns="urn:iso:std:iso:20022:tech:xsd:camt.053.001.02"><BkToCstmrStmt>'
        '<GrpHdr><MsgId>1</MsgId><CreDtTm>2026-11-30T20:00:00</CreDtTm></GrpHdr><Stmt><Id>1</Id>'
        '<Acct><Id><IBAN>DE89370400440532013000</IBAN></Id><Ccy>EUR</Ccy></Acct>'
        + balance('OPBD', '1000.00') + balance('CLBD', '850.00') + entry('100.00', dollars) + entry('50.00', '')
        + '</Stmt></BkToCstmrStmt></Document>')
parser = Camt053Parser(text.encode())
info = parser.get_statement_info()[0]
print('balances', info['OpeningBalance'], 'and', info['ClosingBalance'])
payments = parser.get_transactions()
for payment in payments:
    print(f'paid {payment["Amount"]} {payment["Currency"]}')
print('sum', sum(float(payment['Amount']) for payment in payments))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

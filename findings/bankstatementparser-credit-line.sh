#!/usr/bin/env bash
# bankstatementparser reads the credit line of an account as its balance, and adds payments that are
# not booked.
#
# Packages: bankstatementparser 0.0.29.
# Behaviour: in camt.053 a balance may state the credit line of the account, whose amount comes
#   before the one of the balance. The parser takes the first amount below the element: an overdraft
#   of 120.00 with a credit line of 50000.00 is read as -50000.00, with the code of the closing
#   balance. Its transactions and net amount hold every entry, also those with the status PDNG
#   (pending) or INFO, and leave the status out.
# Expected: -120.00, and a net amount of 30.00 that leads from the opening to the closing balance.
# Instead: read Bal/Amt and Ntry/Sts from the XML, and check opening plus entries against closing.
# Source: ISO 20022, camt.053.001.02: CashBalance3 (CreditLine, Amount) and EntryStatus2Code.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bankstatementparser==0.0.29'
cat > expected.txt <<'EXPECTED'
without a credit line: {'OPBD': '-150.00', 'CLBD': '-120.00'}, net amount 5730.00
with a credit line: {'OPBD': '-50000.00', 'CLBD': '-50000.00'}, net amount 5730.00
columns: Amount Currency DrCr Debtor Creditor Reference ValDt BookgDt AccountId
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from bankstatementparser import CamtParser

LINE = '<CdtLine><Incl>false</Incl><Amt Ccy="EUR">50000.00</Amt></CdtLine>'


def balance(code, amount, line):
    return (
        f'<Bal><Tp><CdOrPrtry><Cd>{code}</Cd></CdOrPrtry></Tp>{line}<Amt Ccy="EUR">{amount}</Amt>'
        '<CdtDbtInd>DBIT</CdtDbtInd><Dt><Dt>2024-01-02</Dt></Dt></Bal>'
    )


def entry(amount, status):
    return (
        f'<Ntry><Amt Ccy="EUR">{amount}</Amt><CdtDbtInd>CRDT</CdtDbtInd><Sts>{status}</Sts>'
        '<BookgDt><Dt>2024-01-02</Dt></BookgDt><BkTxCd/></Ntry>'
    )


for name, line in (('without a credit line', ''), ('with a credit line', LINE)):
    xml = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<Document xmlns="urn:iso:std:iso:20022:tech:xsd:camt.053.001.02"><BkToCstmrStmt><GrpHdr>'
        '<MsgId>1</MsgId><CreDtTm>2024-01-02T00:00:00</CreDtTm></GrpHdr><Stmt><Id>1</Id>'
        '<CreDtTm>2024-01-02T00:00:00</CreDtTm><Acct><Id><IBAN>NL91ABNA0417164300</IBAN></Id>'
        f'<Ccy>EUR</Ccy></Acct>{balance("OPBD", "150.00", line)}{balance("CLBD", "120.00", line)}'
        f'{entry("30.00", "BOOK")}{entry("5000.00", "PDNG")}{entry("700.00", "INFO")}'
        '</Stmt></BkToCstmrStmt></Document>'
    )
    with open('statement.xml', 'w') as file:
        file.write(xml)
    parser = CamtParser('statement.xml')
    balances = {row.Code: str(row.Amount) for row in parser.get_account_balances().itertuples()}
    print(f'{name}: {balances}, net amount {parser.get_statement_stats().NetAmount[0]}')
print('columns:', *parser.get_transactions().columns)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# swiftlib reads no booking day of a payment whose bank states the time as well, and drops the offset of times: two statements
# made at one moment are six hours apart.
#
# Packages: swiftlib 1.0.1, lxml 6.0.2, pydantic 2.12.5.
# Behaviour: camt.053 lets a bank write the booking as a day (Dt) or as a day with a time (DtTm). swiftlib reads Dt alone and
#   returns None for the other, and likewise for the value day. The offset of the creation time is cut off, where a
#   Z is kept: 14:00+01:00 and 08:00-05:00 are one moment and become 14:00 and 08:00.
# Expected: 2026-11-30 in both cases, and times with their offsets.
# Why it matters here: payments without a day are missing in each month.
# Instead: read BookgDt/DtTm of the XML by hand.
# Source: ISO 20022, DateAndDateTimeChoice (camt.053.001.08) and ISODateTime, which allows an offset.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'swiftlib==1.0.1' 'lxml==6.0.2' 'pydantic==2.12.5'
cat > expected.txt <<'EXPECTED'
<Dt>2026-11-30</Dt>: booked 2026-11-30, value 2026-11-30; created 2026-11-30T13:00:00Z: 2026-11-30 13:00:00+00:00
<DtTm>2026-11-30T14:00:00+01:00</DtTm>: booked None, value None; created 2026-11-30T14:00:00+01:00: 2026-11-30 14:00:00
<DtTm>2026-11-30T08:00:00-05:00</DtTm>: booked None, value None; created 2026-11-30T08:00:00-05:00: 2026-11-30 08:00:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from swiftlib.iso20022 import parse

def statement(created, booked):
    return ('<Document xmlns="urn:iso:std:iso:20022:tech:xsd:camt.053.001.08"><BkToCstmrStmt>'
            f'<GrpHdr><MsgId>1</MsgId><CreDtTm>{created}</CreDtTm></GrpHdr><Stmt><Id>1</Id>'
            f'<CreDtTm>{created}</CreDtTm><Acct><Id><IBAN>DE89370400440532013000</IBAN></Id></Acct>'
            '<Ntry><Amt Ccy="EUR">100.00</Amt><CdtDbtInd>CRDT</CdtDbtInd><Sts><Cd>BOOK</Cd></Sts>'
            f'<BookgDt>{booked}</BookgDt><ValDt>{booked}</ValDt><BkTxCd/></Ntry></Stmt></BkToCstmrStmt></Document>')

for created, booked in (('2026-11-30T13:00:00Z', '<Dt>2026-11-30</Dt>'),
                        ('2026-11-30T14:00:00+01:00', '<DtTm>2026-11-30T14:00:00+01:00</DtTm>'),
                        ('2026-11-30T08:00:00-05:00', '<DtTm>2026-11-30T08:00:00-05:00</DtTm>')):
    document = parse(statement(created, booked))
    entry = document.statements[0].transactions[0]
    print(f'{booked}: booked {entry.booking_date}, value {entry.value_date}; '
          f'created {created}: {document.group_header.creation_datetime}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

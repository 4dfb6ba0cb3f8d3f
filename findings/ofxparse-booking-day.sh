#!/usr/bin/env bash
# ofxparse moves payments of an evening in New York to the next day, and of a night in Berlin to the
# one before.
#
# Packages: ofxparse 0.21, lxml 6.1.3, beautifulsoup4 4.15.0, and ofxtools 1.1.1 to compare.
# Behaviour: a time in an OFX statement has the offset of its time zone. ofxparse subtracts the
#   offset and returns the result without a time zone, as it returns a plain date, whose time is
#   0:00. The day, month and year of a payment are then those of Greenwich, and cannot be told from
#   the bank's own. ofxtools returns the same instant with its zone, UTC.
# Expected: the bank's day, 31 December and 1 January, or a time with a zone.
# Why it matters here: day, weekday and month of payments are features, and sums a month decide on
#   credit.
# Instead: ofxtools, and the bank's zone by astimezone; or the first eight digits of DTPOSTED.
# Source: OFX 2.2, Dates, Times, and Time Zones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ofxparse==0.21' 'lxml==6.1.3' 'beautifulsoup4==4.15.0' 'ofxtools==1.1.1'
cat > expected.txt <<'EXPECTED'
20231231200000[-5:EST]: ofxparse 2024-01-01 01:00:00, ofxtools 2024-01-01T01:00:00+00:00
20240101003000[+1:CET]: ofxparse 2023-12-31 23:30:00, ofxtools 2023-12-31T23:30:00+00:00
20240101: ofxparse 2024-01-01 00:00:00, ofxtools 2024-01-01T00:00:00+00:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io

from ofxparse import OfxParser
from ofxtools.Parser import OFXTree

DAYS = ('20231231200000[-5:EST]', '20240101003000[+1:CET]', '20240101')
rows = ''.join(
    f'<STMTTRN><TRNTYPE>DEBIT<DTPOSTED>{day}<TRNAMT>-1.00<FITID>{number}<NAME>payment</STMTTRN>'
    for number, day in enumerate(DAYS))
status = '<STATUS><CODE>0<SEVERITY>INFO</STATUS>'
text = f'''OFXHEADER:100
DATA:OFXSGML
VERSION:102
SECURITY:NONE
ENCODING:USASCII
CHARSET:1252
COMPRESSION:NONE
OLDFILEUID:NONE
NEWFILEUID:NONE

<OFX><SIGNONMSGSRSV1><SONRS>{status}<DTSERVER>20240131<LANGUAGE>ENG</SONRS></SIGNONMSGSRSV1>
<BANKMSGSRSV1><STMTTRNRS><TRNUID>1{status}<STMTRS><CURDEF>USD<BANKACCTFROM><BANKID>1<ACCTID>2
<ACCTTYPE>CHECKING</BANKACCTFROM><BANKTRANLIST><DTSTART>20231201<DTEND>20240131{rows}</BANKTRANLIST>
<LEDGERBAL><BALAMT>1<DTASOF>20240131</LEDGERBAL></STMTRS></STMTTRNRS></BANKMSGSRSV1></OFX>'''
tree = OFXTree()
tree.parse(io.BytesIO(text.encode()))
stamps = [row.dtposted for row in tree.convert().statements[0].transactions]
parsed = OfxParser.parse(io.BytesIO(text.encode())).account.statement.transactions
for day, row, stamp in zip(DAYS, parsed, stamps):
    print(f'{day}: ofxparse {row.date}, ofxtools {stamp.isoformat()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

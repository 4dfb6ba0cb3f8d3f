#!/usr/bin/env bash
# Two readers of bank statements book the reversal of a credit as money that comes in.
#
# Packages: mt-940 5.1.1, camt053-loader-mt940 0.0.23 with camt053 0.0.23.
# Behaviour: in field 61 of a SWIFT MT940 statement the mark RC is the reversal of a credit: money
#   leaves the account. mt-940 negates D only, so RC comes out positive, unless it is given the option
#   reversal_sign (issue 130, merged in 2026, off by default). camt053-loader-mt940 writes the indicators
#   CRDT and reversal: ISO 20022 reads that as the reversal of a debit, the opposite. Each entry is
#   off by twice its amount against the closing balance, which neither compares.
# Expected: -250.00, and DBIT with the reversal indicator. RD is the other way round.
# Instead: mt940.parse(..., options=mt940.Options.all()); add up the entries and compare the balance.
# Source: SWIFT MT940, field 61, subfield 3; ISO 20022 camt.053, ReversalIndicator.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mt-940==5.1.1' 'camt053-loader-mt940==0.0.23' 'camt053==0.0.23'
cat > expected.txt <<'EXPECTED'
C: mt-940 250.00, with the option 250.00, camt.053 CRDT reversal False, balance moves 250.00
D: mt-940 -250.00, with the option -250.00, camt.053 DBIT reversal False, balance moves -250.00
RC: mt-940 250.00, with the option -250.00, camt.053 CRDT reversal True, balance moves -250.00
RD: mt-940 250.00, with the option 250.00, camt.053 DBIT reversal True, balance moves 250.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from decimal import Decimal

import mt940
from camt053_loader_mt940 import parse_mt940

for mark in ('C', 'D', 'RC', 'RD'):
    moved = Decimal('250.00') * (1 if mark in ('C', 'RD') else -1)
    closing = str(1000 + moved).replace('.', ',')
    text = (
        ':20:STATEMENT\n:25:NL00BANK0000000000\n:28C:1/1\n:60F:C240101EUR1000,00\n'
        f':61:2401020102{mark}250,00NTRFREF1//BANK1\n:86:payment\n:62F:C240102EUR{closing}\n'
    )
    plain = mt940.parse(text)[0].data['amount'].amount
    signed = mt940.parse(text, options=mt940.Options.all())[0].data['amount'].amount
    entry = parse_mt940(text).statements[0].entries[0]
    print(f'{mark}: mt-940 {plain}, with the option {signed}, camt.053 {entry.credit_debit_indicator} '
          f'reversal {entry.reversal_indicator}, balance moves {moved}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

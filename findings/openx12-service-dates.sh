#!/usr/bin/env bash
# openx12 reads no date of a service or a claim from a remittance advice (X12 835), since it looks one element too far.
#
# Packages: openx12 0.2.1.
# Behaviour: DTM holds a qualifier, a date and a time. openx12 takes the third element for the date, which is empty in an
#   835, and skips the segment. All services and claims are without a date, and no message says so. The 835 of the
#   Accredited Standards Committee has the date in DTM02.
# Expected: 2026-11-05 for DTM*472*20261105.
# Why it matters here: payments are joined to treatments by the date of the service.
# Instead: the segments that the result lists as well, where the date is the second element.
# Source: ASC X12N 005010X221A1, segments DTM in loops 2100 and 2110.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'openx12==0.2.1'
cat > expected.txt <<'EXPECTED'
valid: paid 80, service date None, claim date None
with the date as a third element: paid 80, service date 2026-11-05, claim date 2026-11-05
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from openx12 import x835

SEGMENTS = [
    'ISA*00*          *00*          *ZZ*PAYER          *ZZ*CLINIC         *261130*0800*^*00501*000000001*0*P*:',
    'GS*HP*PAYER*CLINIC*20261130*0800*1*X*005010X221A1', 'ST*835*0001',
    'BPR*I*80*C*ACH*CCP*01*999999992*DA*123456*1512345678**01*999988880*DA*98765*20261130',
    'TRN*1*12345*1512345678', 'N1*PR*PAYER', 'N1*PE*CLINIC*XX*1999999984', 'LX*1',
    'CLP*P1*1*150*80*30*12*X1', 'NM1*QC*1*DOE*JANE****MI*M1', 'DTM*232*20261105',
    'SVC*HC:99213*150*80**1', 'DTM*472*20261105', 'CAS*CO*45*40', 'CAS*PR*2*30',
    'SE*14*0001', 'GE*1*1', 'IEA*1*000000001']
for name, change in (('valid', ''), ('with the date as a third element', '*')):
    text = '~'.join(s.replace('*2026', '*' + change + '2026') if s.startswith('DTM') else s for s in SEGMENTS) + '~'
    claim = x835.parse(text).json()['summary']['claims'][0]
    service = claim['services'][0]
    print(f'{name}: paid {service["line_item_payment_amount"]:.0f}, service date {service.get("service_date")}, '
          f'claim date {claim.get("claim_date_from")}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

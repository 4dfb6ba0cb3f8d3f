#!/usr/bin/env bash
# healthpipe reads no date from an HL7 v2 message, and does not say whose laboratory value it read.
#
# Packages: healthpipe 0.1.0, pydantic 2.11.10, pandas 2.2.3, numpy 2.2.6.
# Behaviour: it cuts a time stamp to the length of its format without the per cent signs, so that it tries
#   to read 20260301113000 from its first 6, 5 and 3 digits. Dates of birth and times of observations are
#   missing in all records, without a message. An observation has no patient either: it is the next record
#   after one, and every value is final, corrected or preliminary ones too.
# Expected: 1950-02-01, 2026-03-01 11:30, a reference to the patient, and the status of OBX-11.
# Why it matters here: a person's contribution cannot be bounded where values have no person and no time.
# Instead: hl7 or hl7apy, which return the fields.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'pydantic==2.11.10' 'healthpipe==0.1.0'
cat > expected.txt <<'EXPECTED'
patient 1: born None
creatinine 1.1: status final, at None, of patient None
patient 2: born None
creatinine 3.4: status final, at None, of patient None
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import asyncio
from pathlib import Path

from healthpipe.ingest.hl7v2 import HL7v2Source

messages = [
    ('1', '19500201', '1.1', '20260301113000', 'F'),
    ('2', '19831105', '3.4', '202603011215', 'P'),
]
text = ''
for number, birth, value, time, status in messages:
    text += '\r'.join([
        f'MSH|^~\\&|LAB|HOSPITAL|||20260301130000||ORU^R01|{number}|P|2.5',
        f'PID|1||{number}^^^HOSPITAL^MR||Doe^Jane||{birth}|F',
        f'OBX|1|NM|2160-0^Creatinine^LN||{value}|mg/dL|||||{status}|||{time}',
    ]) + '\n'
Path('results.hl7').write_text(text, newline='')
for record in asyncio.run(HL7v2Source(path='results.hl7').ingest()).records:
    data = record.data
    if data['resourceType'] == 'Patient':
        print(f'patient {data["id"]}: born {data["birthDate"]}')
    else:
        print(f'creatinine {data["valueQuantity"]["value"]}: status {data["status"]},',
              f'at {data["effectiveDateTime"]}, of patient {data.get("subject")}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# hl7parser cuts names and doctors when it writes a message: the hospital that a doctor's number belongs to, the kind of
# the number and the title behind a name are lost.
#
# Packages: hl7parser 0.7.5.
# Behaviour: a field with a list of components is written from that list, and the components behind its end are not.
#   The list of a doctor ends with the seventh, the list of a name with the ninth. Fields without a list are kept.
# Expected: the text that was read, since nothing has changed it, as for the other fields.
# Why it matters here: a number without its issuer is another doctor's in the next hospital, and no error is raised.
# Instead: take the text of the field from the message that was read.
# Source: HL7 v2.5, chapter 2.A: XCN has 23 components, among them 9, assigning authority, and 13, identifier type
#   code; XPN has 14.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7parser==0.7.5'
cat > expected.txt <<'EXPECTED'
read    PV1|1|I|W^1^2||||0148^Doc^Ann^^^Dr^MD^^HOSP^L^^^DN
written PV1|1|I|W^1^2||||0148^Doc^Ann^^^Dr^MD|
  components lost: 6
read    PID|1||123^^^H^MR||Example^Ada^^^^^L^A^^G^^20200101^20250101^MD
written PID|1||123^^^H^MR||Example^Ada^^^^^L^A^|
  components lost: 6
read    OBX|1|CE|883-9^Blood group^LN||A^A^99LAB^278149003^Group A^SCT
written OBX|1|CE|883-9^Blood group^LN||A^A^99LAB^278149003^Group A^SCT|
  components lost: 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7parser.hl7 import HL7Message

segments = [
    'PV1|1|I|W^1^2||||0148^Doc^Ann^^^Dr^MD^^HOSP^L^^^DN',
    'PID|1||123^^^H^MR||Example^Ada^^^^^L^A^^G^^20200101^20250101^MD',
    'OBX|1|CE|883-9^Blood group^LN||A^A^99LAB^278149003^Group A^SCT',
]
message = HL7Message('\r'.join(['MSH|^~\\&|LAB|H|EHR|H|20260301120000||ADT^A01|1|P|2.5', *segments]))
for before, after in zip(segments, str(message).splitlines()[1:], strict=True):
    lost = len(before.split('|')[-1].split('^')) - len(after.rstrip('|').split('|')[-1].rstrip('^').split('^'))
    print(f'read    {before}\nwritten {after}\n  components lost: {lost}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# hl7gen exports laboratory results that belong to nobody: neither is an Observation linked to the Patient, nor has the
# Patient the number of the message.
#
# Packages: hl7gen 0.2.0, hl7apy 1.3.5, fhir.resources 8.3.0, fhir-core 1.1.12, pydantic 2.14.4.
# Behaviour: the bundle has a Patient with the name, and Observations and an Encounter without a subject. PID-3, the
#   list of patient numbers, is left out, and no entry has an address that another could refer to.
# Expected: the identifiers of PID-3, and a reference to the patient in each result; its documentation says that it
#   refuses what it does not support "rather than producing a partial or silently wrong conversion".
# Why it matters here: the results of two messages in one store cannot be told apart, and people with the same name are
#   one.
# Instead: add identifier and subject before the bundle is sent.
# Source: HL7 v2.5, chapter 3.4.2.3: PID-3 is required; FHIR R5, Observation.subject, "who and/or what the observation
#   is about"; HL7 v2-to-FHIR, segment maps PID and OBX.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7gen==0.2.0' 'hl7apy==1.3.5' 'fhir.resources==8.3.0' 'fhir-core==1.1.12' 'pydantic==2.14.4'
cat > expected.txt <<'EXPECTED'
message about patient 1001:
  Patient: address None, identifier None, subject None, number in it False
  Encounter: address None, identifier None, subject None, number in it False
  Observation: address None, identifier None, subject None, number in it False
message about patient 2002:
  Patient: address None, identifier None, subject None, number in it False
  Encounter: address None, identifier None, subject None, number in it False
  Observation: address None, identifier None, subject None, number in it False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7gen.fhir_export import message_to_fhir

for number, name in (('1001', 'Example^Ada'), ('2002', 'Example^Ada')):
    message = '\r'.join([
        'MSH|^~\\&|LAB|H|EHR|H|20260301120000||ORU^R01^ORU_R01|1|P|2.5', f'PID|1||{number}^^^H^MR||{name}||19800101|F',
        'PV1|1|I', 'OBR|1||1|CBC^Blood', 'OBX|1|NM|2823-3^Potassium||4.1|mmol/L|||||F',
    ])
    bundle = message_to_fhir(message)
    print(f'message about patient {number}:')
    for entry in bundle['entry']:
        resource = entry['resource']
        print(f"  {resource['resourceType']}: address {entry.get('fullUrl')}, identifier {resource.get('identifier')}, "
              f"subject {resource.get('subject')}, number in it {number in str(resource)}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

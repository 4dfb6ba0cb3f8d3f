#!/usr/bin/env bash
# fhiry reads valid references to one patient as several patients.
#
# Packages: fhiry 5.2.2, pandas 2.3.3, numpy 2.4.6, requests 2.34.2, prodict 0.8.23, timeago 1.0.16,
#   tqdm 4.70.1.
# Behaviour: patientId is documented as the id of the resource for a Patient, and derived from its
#   subject for other resources. It is the reference without the texts "Patient/" and "urn:uuid:".
#   That is the id for a relative reference. An absolute one keeps the address of the server, a
#   versioned one its version, and a reference by fullUrl in a transaction is not the id of the
#   Patient either, so groups by patientId split one patient.
# Expected: one patientId for all five rows.
# Instead: resolve references by fullUrl in the bundle, and take the part after "Patient/" and
#   before "/_history".
# Source: FHIR R4, References, and Bundle, "Resolving references in Bundles".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.4.6' 'requests==2.34.2' 'prodict==0.8.23' 'timeago==1.0.16' 'tqdm==4.70.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fhiry==5.2.2'
cat > expected.txt <<'EXPECTED'
(the patient): patientId p1
Patient/p1: patientId p1
https://ehr.example.org/fhir/Patient/p1: patientId https://ehr.example.org/fhir/p1
Patient/p1/_history/2: patientId p1/_history/2
urn:uuid:3f1c0e6e-8c34-4d67-9b0e-000000000001: patientId 3f1c0e6e-8c34-4d67-9b0e-000000000001
one patient, 4 identifiers
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fhiry.base_fhiry import BaseFhiry

full_url = 'urn:uuid:3f1c0e6e-8c34-4d67-9b0e-000000000001'
entries = [{'fullUrl': full_url, 'resource': {'resourceType': 'Patient', 'id': 'p1', 'gender': 'female'}}]
references = ['Patient/p1', 'https://ehr.example.org/fhir/Patient/p1', 'Patient/p1/_history/2', full_url]
for number, reference in enumerate(references):
    entries.append({'resource': {
        'resourceType': 'Observation', 'id': f'o{number}', 'status': 'final', 'subject': {'reference': reference},
        'code': {'coding': [{'system': 'http://loinc.org', 'code': '29463-7'}]},
        'valueQuantity': {'value': 70 + number, 'unit': 'kg'}}})
table = BaseFhiry().process_bundle_dict({'resourceType': 'Bundle', 'type': 'collection', 'entry': entries})
for reference, patient in zip(['(the patient)', *references], table['patientId']):
    print(f'{reference}: patientId {patient}')
print(f'one patient, {table["patientId"].nunique()} identifiers')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

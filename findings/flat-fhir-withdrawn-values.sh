#!/usr/bin/env bash
# flat-fhir turns withdrawn measurements into final ones.
#
# Packages: flat-fhir 0.1.4, pandas 2.3.3, numpy 2.4.6, openpyxl 3.1.5, requests 2.34.2.
# Behaviour: FHIR's status of an observation is required and modifies its meaning:
#   "entered-in-error" is a value that was withdrawn, "cancelled" one that was not measured. The
#   sheets of vital signs and laboratory values have no column for it, so a pulse of 700 that was
#   withdrawn is one of the pulses. to_fhir writes "final" for all. The sheets of medications,
#   procedures and vaccinations have the status.
# Expected: a column with the status, as there, or no row for entered-in-error.
# Instead: remove entries whose status is entered-in-error or cancelled from the bundle first.
# Source: FHIR R4, Observation.status, a modifier element.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.4.6' 'openpyxl==3.1.5' 'requests==2.34.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'flat-fhir==0.1.4'
cat > expected.txt <<'EXPECTED'
columns: primary_key, performer, timestamp, encounter_id, source_resource_id, notes, heart_rate_bpm
mean pulse 281
70 with status final comes back as final
700 with status entered-in-error comes back as final
72 with status preliminary comes back as final
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from flat_fhir.core import FlatFHIR

entries = []
for number, (value, status) in enumerate([(70, 'final'), (700, 'entered-in-error'), (72, 'preliminary')]):
    entries.append({'resource': {
        'resourceType': 'Observation', 'id': f'o{number}', 'status': status, 'subject': {'reference': 'Patient/p'},
        'category': [{'coding': [{'system': 'http://terminology.hl7.org/CodeSystem/observation-category',
                                  'code': 'vital-signs'}]}],
        'code': {'coding': [{'system': 'http://loinc.org', 'code': '8867-4'}]},
        'effectiveDateTime': f'2026-03-01T0{number}:00:00Z',
        'valueQuantity': {'value': value, 'unit': '/min', 'system': 'http://unitsofmeasure.org', 'code': '/min'}}})
flat = FlatFHIR({'resourceType': 'Bundle', 'type': 'collection', 'entry': entries})
back = {entry['resource']['id']: entry['resource'] for entry in flat.to_fhir()['entry']}
print('columns:', ', '.join(flat.vitals.columns))
print(f'mean pulse {flat.vitals["heart_rate_bpm"].mean():.0f}')
for entry in entries:
    given = entry['resource']
    seen = back[given['id']]
    print(f'{given["valueQuantity"]["value"]} with status {given["status"]} comes back as {seen["status"]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

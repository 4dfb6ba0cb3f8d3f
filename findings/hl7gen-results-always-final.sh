#!/usr/bin/env bash
# hl7gen exports each laboratory result as final: a potassium of 9.9 that the laboratory has reported as wrong is a
# final result in FHIR, and so is a preliminary one.
#
# Packages: hl7gen 0.2.0, hl7apy 1.3.5, fhir.resources 8.3.0, fhir-core 1.1.12, pydantic 2.14.4.
# Behaviour: message_to_fhir writes the status final into every Observation and does not read OBX-11.
# Expected: entered-in-error for W, preliminary for P, corrected for C; its documentation says that it refuses what it
#   does not support "rather than producing a partial or silently wrong conversion".
# Why it matters here: a withdrawn result is treated.
# Instead: filter by OBX-11 before, or set the status from it, as below.
# Source: HL7 v2.5, chapter 7.4.2.11 and table 0085; HL7 v2-to-FHIR, concept map of table 0085 to ObservationStatus.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7gen==0.2.0' 'hl7apy==1.3.5' 'fhir.resources==8.3.0' 'fhir-core==1.1.12' 'pydantic==2.14.4'
cat > expected.txt <<'EXPECTED'
Haemoglobin 13.1 g/dL, OBX-11 F: hl7gen final, by the table final
Sodium 139.0 mmol/L, OBX-11 C: hl7gen final, by the table corrected
Glucose 95.0 mg/dL, OBX-11 P: hl7gen final, by the table preliminary
Potassium 9.9 mmol/L, OBX-11 W: hl7gen final, by the table entered-in-error
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7gen.fhir_export import message_to_fhir

by_table = {'F': 'final', 'C': 'corrected', 'P': 'preliminary', 'W': 'entered-in-error'}
results = [
    ('718-7^Haemoglobin', '13.1', 'g/dL', 'F'), ('2951-2^Sodium', '139', 'mmol/L', 'C'),
    ('2345-7^Glucose', '95', 'mg/dL', 'P'), ('2823-3^Potassium', '9.9', 'mmol/L', 'W'),
]
message = '\r'.join([
    'MSH|^~\\&|LAB|H|EHR|H|20260301120000||ORU^R01^ORU_R01|1|P|2.5', 'PID|1||123^^^H^MR||Example^Ada||19800101|F',
    'OBR|1||1|CBC^Blood', *(
        f'OBX|{number}|NM|{code}||{value}|{unit}|||||{status}'
        for number, (code, value, unit, status) in enumerate(results, 1)
    ),
])
entries = [entry['resource'] for entry in message_to_fhir(message)['entry']]
found = [entry for entry in entries if entry['resourceType'] == 'Observation']
for (code, value, unit, status), observation in zip(results, found, strict=True):
    print(f"{code.split('^')[1]} {observation['valueQuantity']['value']} {unit}, OBX-11 {status}: hl7gen "
          f"{observation['status']}, by the table {by_table[status]}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

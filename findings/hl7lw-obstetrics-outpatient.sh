#!/usr/bin/env bash
# hl7lw sends obstetric patients as outpatients, and has no name for the code of obstetrics, B.
#
# Packages: hl7lw 0.1.2.
# Behaviour: PatientClass.Obstetrics has the code O, the one of outpatients. Two members of an enumeration with one value
#   are one member, so that the two cannot be told apart in a program either, and PatientClass('B') is an error.
# Expected: B.
# Why it matters here: the class of a visit decides about beds, wards and bills, and mothers in labour are looked for in
#   the outpatient department.
# Instead: write 'B' into PV1-2 of the finished segment.
# Source: HL7 v2.3.1, the version that the package writes, chapter 3, table 0004, patient class: E, I, O, P, R and B for
#   obstetrics.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7lw==0.1.2'
cat > expected.txt <<'EXPECTED'
Emergency: hl7lw E, table 0004 E
Inpatient: hl7lw I, table 0004 I
Outpatient: hl7lw O, table 0004 O
Preadmit: hl7lw P, table 0004 P
RecurringPatient: hl7lw R, table 0004 R
Obstetrics: hl7lw O, table 0004 B
Obstetrics is Outpatient: True
B: 'B' is not a valid PatientClass
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7lw.utils import PatientClass, Visit

table = {
    'Emergency': 'E', 'Inpatient': 'I', 'Outpatient': 'O', 'Preadmit': 'P', 'RecurringPatient': 'R', 'Obstetrics': 'B',
}
for name, code in table.items():
    segment = Visit(patient_class=PatientClass[name]).as_segment()
    print(f'{name}: hl7lw {segment[2]}, table 0004 {code}')
print('Obstetrics is Outpatient:', PatientClass.Obstetrics is PatientClass.Outpatient)
try:
    PatientClass('B')
except ValueError as error:
    print('B:', error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

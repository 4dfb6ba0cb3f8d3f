#!/usr/bin/env bash
# hl7find gives the first letter of a field where its first component is asked for and the field has just one: the value
# 13.1 is 1, and a patient with the number 123 has the number 1.
#
# Packages: hl7find 1.0.2, hl7 0.4.5.
# Behaviour: a field without a component separator is kept as a text, and OBX.5.1 takes the first character of it. The
#   same query of a field with two components gives the first one. OBX.5.2 is the second character.
# Expected: the whole field, which is its first component: in HL7 v2 trailing empty components may be left out, and
#   a reader of a later version must find the old value in the first component.
# Why it matters here: one sender writes 123^^^HOSPITAL and the next 123; both are valid.
# Instead: find the field and look at its type.
# Source: HL7 v2.5.1, chapter 2, section 2.5.3 and 2.8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7find==1.0.2' 'hl7==0.4.5'
cat > expected.txt <<'EXPECTED'
patient 123^^^HOSPITAL, PID.3.1: hl7find '123', hl7 '123'
patient 123^^^HOSPITAL, OBX.3.1: hl7find '718-7', hl7 '718-7'
patient 123^^^HOSPITAL, OBX.5.1: hl7find '1', hl7 '13.1'
patient 123^^^HOSPITAL, OBX.5.2: hl7find '3', hl7 nothing
patient 123, PID.3.1: hl7find '1', hl7 '123'
patient 123, OBX.3.1: hl7find '718-7', hl7 '718-7'
patient 123, OBX.5.1: hl7find '1', hl7 '13.1'
patient 123, OBX.5.2: hl7find '3', hl7 nothing
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import hl7
from hl7find.hl7find import HL7Message

for number in ('123^^^HOSPITAL', '123'):
    text = f'MSH|^~\\&|LAB|HOSPITAL|EMR|CLINIC|20261130080000||ORU^R01|4711|P|2.5\nPID|1||{number}||DOE^JANE\nOBX|1|NM|718-7^Hemoglobin||13.1|g/dL\n'
    message, other = HL7Message(text), hl7.parse(text.replace('\n', '\r'))
    for place in ('PID.3.1', 'OBX.3.1', 'OBX.5.1', 'OBX.5.2'):
        segment, field, component = place.split('.')
        try:
            right = repr(other.extract_field(segment, 1, int(field), 1, int(component)))
        except (IndexError, hl7.exceptions.HL7Exception):
            right = 'nothing'
        print(f'patient {number}, {place}: hl7find {message.find(place)!r}, hl7 {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

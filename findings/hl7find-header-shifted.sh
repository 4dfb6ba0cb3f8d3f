#!/usr/bin/env bash
# hl7find numbers the fields of the message header one too low: MSH.9, the type of a message, is its control number.
#
# Packages: hl7find 1.0.2, hl7 0.4.5.
# Behaviour: MSH-1 of HL7 v2 is the separator itself and MSH-2 the other four delimiters. hl7find starts to count with
#   the delimiters, so that MSH.9 gives MSH-10, and MSH.12, the version of HL7, None. It documents the typical
#   HL7 notation. All other segments have their usual numbers. An update of MSH.3 changes MSH-4.
# Expected: as in the specification and as the package hl7 has it.
# Why it matters here: a rule for results (MSH-9) compares the control number, and matches nothing or by chance.
# Instead: one less for the header.
# Source: HL7 v2.5.1, chapter 2, section 2.14.9.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7find==1.0.2' 'hl7==0.4.5'
cat > expected.txt <<'EXPECTED'
MSH.3, sending application: hl7find HOSPITAL, hl7 LAB
MSH.4, sending facility: hl7find EMR, hl7 HOSPITAL
MSH.9, message type: hl7find 4711, hl7 ORU^R01
MSH.10, control number: hl7find P, hl7 4711
MSH.12, version: hl7find None, hl7 2.5
OBX.5, value: hl7find 13.1, hl7 13.1
OBX.6, unit: hl7find g/dL, hl7 g/dL
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import hl7
from hl7find.hl7find import HL7Message

TEXT = """MSH|^~\\&|LAB|HOSPITAL|EMR|CLINIC|20261130080000||ORU^R01|4711|P|2.5
PID|1||123^^^HOSPITAL||DOE^JANE
OBX|1|NM|718-7^Hemoglobin||13.1|g/dL
"""
message = HL7Message(TEXT)
other = hl7.parse(TEXT.replace('\n', '\r'))
for place, meaning in (('MSH.3', 'sending application'), ('MSH.4', 'sending facility'), ('MSH.9', 'message type'),
                       ('MSH.10', 'control number'), ('MSH.12', 'version'), ('OBX.5', 'value'), ('OBX.6', 'unit')):
    segment, number = place.split('.')
    print(f'{place}, {meaning}: hl7find {message.find(place)}, hl7 {other.segment(segment)[int(number)]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

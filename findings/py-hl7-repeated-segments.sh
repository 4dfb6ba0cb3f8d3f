#!/usr/bin/env bash
# py-hl7 keeps one segment of each kind where it writes a message from a table: of three results the last one is left.
#
# Packages: py-hl7 0.0.5, openpyxl 3.1.2.
# Behaviour: hl7_to_csv writes one line for each value of the message, in which the three OBX have the same names.
#   csv_to_hl7 collects the lines in a dictionary by the name of the segment, where the later one overwrites the
#   earlier. A message that is converted and converted back has lost two of three results, and a field that only
#   the first result had (a comment, a flag) is now one of the last.
# Expected: the message.
# Why it matters here: the flag "critical" of a potassium of 7.1 is then a flag of a normal sodium.
# Instead: keep the messages, and use the table for reading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'py-hl7==0.0.5' 'openpyxl==3.1.2'
cat > expected.txt <<'EXPECTED'
message:
    MSH|^~\&|LAB|HOSPITAL|EMR|CLINIC|20261130080000||ORU^R01|4711|P|2.5
    PID|1||123||DOE^JANE
    OBX|1|NM|2823-3^Potassium||7.1|mmol/L|3.5-5.1|HH
    OBX|2|NM|718-7^Hemoglobin||13.1|g/dL
    OBX|3|NM|2951-2^Sodium||140|mmol/L
converted and back:
    MSH|^~\&|LAB|HOSPITAL|EMR|CLINIC|20261130080000||ORU^R01|4711|P|2.5
    PID|1||123||DOE^JANE
    OBX|3|NM|2951-2^Sodium||140|mmol/L|3.5-5.1|HH
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7 import csv_to_hl7, hl7_to_csv

TEXT = r'''MSH|^~\&|LAB|HOSPITAL|EMR|CLINIC|20261130080000||ORU^R01|4711|P|2.5
PID|1||123||DOE^JANE
OBX|1|NM|2823-3^Potassium||7.1|mmol/L|3.5-5.1|HH
OBX|2|NM|718-7^Hemoglobin||13.1|g/dL
OBX|3|NM|2951-2^Sodium||140|mmol/L'''
back = csv_to_hl7(hl7_to_csv(TEXT))
for name, text in (('message', TEXT), ('converted and back', back)):
    print(f'{name}:')
    for line in text.strip().split('\n'):
        print('   ', line.strip())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# hl7v2json keeps the last one of several values of a field: of a patient with a number of the hospital and one of the city
# the number of the hospital is lost, and her name is the one she was born with.
#
# Packages: hl7v2json 1.0.2, hl7 0.4.5, setuptools 75.8.0.
# Behaviour: the values of a field are read in a loop that keeps what it read last. The first value, which is the
#   preferred one by the specification (of a name the legal one), is overwritten without a message.
# Expected: a list, or the first value.
# Why it matters here: records are joined by the number of the hospital.
# Instead: the package hl7, which hl7v2json uses.
# Source: HL7 v2.7, chapter 3, section 3.4.2.5: the primary or legal name comes first in PID-5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7v2json==1.0.2' 'hl7==0.4.5' 'setuptools==75.8.0'
cat > expected.txt <<'EXPECTED'
hl7v2json: {'idNumber': '456', 'assigningAuthority': 'CITY', 'identifierTypeCode': 'PI'} {'familyName': 'MILLER', 'givenName': 'JANE', 'nameTypeCode': 'M'}
hl7: ['123^^^HOSPITAL^MR', '456^^^CITY^PI'] ['DOE^JANE^^^^^L', 'MILLER^JANE^^^^^M']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import hl7
from hl7v2json.parser import parse

TEXT = '\r'.join([
    r'MSH|^~\&|ADT|HOSPITAL|EMR|CLINIC|20261130080000||ADT^A01^ADT_A01|4711|P|2.7',
    'EVN||20261130080000',
    'PID|1||123^^^HOSPITAL^MR~456^^^CITY^PI||DOE^JANE^^^^^L~MILLER^JANE^^^^^M||19800101|F',
    'PV1|1|I', ''])
patient = parse(TEXT)['segments']['patientIdentification']
print('hl7v2json:', patient['patientIdentifierList'], patient['patientName'])
fields = hl7.parse(TEXT).segment('PID')
print('hl7:', [str(value) for value in fields[3]], [str(value) for value in fields[5]])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# brightohir turns refused vaccinations into given ones, and given ones into not-done.
#
# Packages: brightohir 2.1.2, hl7apy 1.3.5, fhir.resources 8.3.0.
# Behaviour: the completion status of an HL7 v2 vaccination is RXA-20: CP complete, RE refused, NA
#   not administered. The converter to FHIR R5 does not read it. It takes the status from RXA-9,
#   which says where the information comes from (00 is a new record, 01 a historical one), and
#   compares the whole coded field with 00. A refused dose with an empty RXA-9 is completed, as is
#   one that was not administered; a given dose with the usual 00^New immunization record^NIP001 is
#   not-done. The time zone of all time stamps is dropped as well.
# Expected: completed for CP and PA, not-done for RE and NA.
# Instead: read RXA-20 from the message (hl7apy), and set the status of each Immunization.
# Source: HL7 v2.5.1, section 4.14.7 (RXA), and the implementation guide for immunization
#   messaging.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'brightohir==2.1.2' 'hl7apy==1.3.5' 'fhir.resources==8.3.0'
cat > expected.txt <<'EXPECTED'
given, RXA-9 00, RXA-20 CP: not-done, 2026-03-15T23:30:00
given, RXA-9 empty, RXA-20 CP: completed, 2026-03-15T23:30:00
given elsewhere earlier, RXA-9 01, RXA-20 CP: not-done, 2026-03-15T23:30:00
refused, RXA-9 empty, RXA-20 RE: completed, 2026-03-15T23:30:00
refused, RXA-9 00, RXA-20 RE: not-done, 2026-03-15T23:30:00
not administered, RXA-9 empty, RXA-20 NA: completed, 2026-03-15T23:30:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from brightohir import V2Converter

HEAD = (
    'MSH|^~\\&|CLINIC|A|REGISTRY|B|20260315120000-0500||VXU^V04^VXU_V04|1|P|2.5.1\r'
    'PID|1||123^^^A^MR||Doe^Jane||19800101|F\rORC|RE||1\r'
)
new, old = '00^New immunization record^NIP001', '01^Historical information^NIP001'
for meaning, notes, refusal, status in (
    ('given', new, '', 'CP'),
    ('given', '', '', 'CP'),
    ('given elsewhere earlier', old, '', 'CP'),
    ('refused', '', '00^Parental decision^NIP002', 'RE'),
    ('refused', new, '00^Parental decision^NIP002', 'RE'),
    ('not administered', '', '', 'NA'),
):
    dose = f'RXA|0|1|20260315233000-0500||08^Hep B^CVX|0.5|mL||{notes}|||||||||{refusal}||{status}'
    bundle = V2Converter().convert(HEAD + dose)
    found = [entry['resource'] for entry in bundle['entry']]
    vaccination = next(one for one in found if one['resourceType'] == 'Immunization')
    print(f'{meaning}, RXA-9 {notes[:2] or "empty"}, RXA-20 {status}: {vaccination["status"]},',
          vaccination['occurrenceDateTime'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

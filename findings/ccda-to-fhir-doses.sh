#!/usr/bin/env bash
# ccda-to-fhir drops doses above 3650 from the medicines that a patient takes, and makes an unknown
# dose a dose of 1.
#
# Packages: ccda-to-fhir 0.3, fhir.resources 8.3.0, lxml 6.1.3, pydantic 2.14.4.
# Behaviour: doses pass through the function that reads the period between them. It takes more than
#   3650, ten years of days, for an error, whatever the unit: a MedicationStatement of 5000 units of
#   heparin or of 1.2 million units of penicillin has a rhythm and no dose. A dose with nullFlavor
#   UNK has no value, for which the function returns 1: the result states 1, without a unit, in a
#   MedicationRequest too. No warning is logged.
# Expected: the dose as it is stated, and no dose where it is unknown.
# Why it matters here: doses are features of models in hospitals, and 1 is a number like others.
# Instead: compare doseQuantity with the document, or refuse a dose without a unit.
# Source: C-CDA R2.1, Medication Activity, doseQuantity; HL7 C-CDA on FHIR, Medications mapping.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ccda-to-fhir==0.3' 'fhir.resources==8.3.0' 'lxml==6.1.3' 'pydantic==2.14.4'
cat > expected.txt <<'EXPECTED'
value="3500" unit="[iU]": MedicationStatement, every 12 h, dose 3500 [iU]
value="5000" unit="[iU]": MedicationStatement, every 12 h, dose None None
nullFlavor="UNK": MedicationStatement, every 12 h, dose 1 None
value="3500" unit="[iU]": MedicationRequest, every 12 h, dose 3500 [iU]
value="5000" unit="[iU]": MedicationRequest, every 12 h, dose 5000 [iU]
nullFlavor="UNK": MedicationRequest, every 12 h, dose 1 None
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

from ccda_to_fhir.convert import convert_document

logging.disable(logging.INFO)
ADDRESS = ('<addr use="HP"><streetAddressLine>1 Elm St</streetAddressLine><city>Salem</city><state>MA</state>'
           '<postalCode>01970</postalCode><country>US</country></addr><telecom value="tel:+15555550100"/>')
DOCUMENT = f'''<ClinicalDocument xmlns="urn:hl7-org:v3" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
<realmCode code="US"/><typeId root="2.16.840.1.113883.1.3" extension="POCD_HD000040"/>
<templateId root="2.16.840.1.113883.10.20.22.1.1" extension="2015-08-01"/>
<templateId root="2.16.840.1.113883.10.20.22.1.2" extension="2015-08-01"/><id root="1.2.3"/>
<code code="34133-9" codeSystem="2.16.840.1.113883.6.1"/><title>Summary</title>
<effectiveTime value="20240102"/><confidentialityCode code="N" codeSystem="2.16.840.1.113883.5.25"/>
<languageCode code="en-US"/><recordTarget><patientRole><id root="1.2.4" extension="1"/>{ADDRESS}<patient>
<name use="L"><given>Ann</given><family>Lee</family></name>
<administrativeGenderCode code="F" codeSystem="2.16.840.1.113883.5.1"/><birthTime value="19600101"/>
</patient></patientRole></recordTarget><author><time value="20240102"/><assignedAuthor>
<id root="1.2.5" extension="1"/>{ADDRESS}<assignedPerson><name><given>Bo</given><family>Ray</family></name>
</assignedPerson></assignedAuthor></author><custodian><assignedCustodian>
<representedCustodianOrganization><id root="1.2.6"/><name>Clinic</name>{ADDRESS}
</representedCustodianOrganization></assignedCustodian></custodian>
<component><structuredBody><component><section>
<templateId root="2.16.840.1.113883.10.20.22.2.1.1" extension="2014-06-09"/>
<code code="10160-0" codeSystem="2.16.840.1.113883.6.1"/><title>Medications</title><text>Medications</text>
<entry><substanceAdministration classCode="SBADM" moodCode="MOOD">
<templateId root="2.16.840.1.113883.10.20.22.4.16" extension="2014-06-09"/><id root="1.2.7"/>
<statusCode code="active"/><effectiveTime xsi:type="IVL_TS"><low value="20240101"/></effectiveTime>
<effectiveTime xsi:type="PIVL_TS" operator="A"><period value="12" unit="h"/></effectiveTime>
<doseQuantity DOSE/><consumable><manufacturedProduct classCode="MANU">
<templateId root="2.16.840.1.113883.10.20.22.4.23" extension="2014-06-09"/><manufacturedMaterial>
<code code="5224" codeSystem="2.16.840.1.113883.6.88" displayName="heparin"/></manufacturedMaterial>
</manufacturedProduct></consumable></substanceAdministration></entry>
</section></component></structuredBody></component></ClinicalDocument>'''
for mood in ('EVN', 'INT'):
    for dose in ('value="3500" unit="[iU]"', 'value="5000" unit="[iU]"', 'nullFlavor="UNK"'):
        result = convert_document(DOCUMENT.replace('MOOD', mood).replace('DOSE', dose))
        resource = next(entry['resource'] for entry in result['bundle']['entry']
                        if entry['resource']['resourceType'].startswith('Medication'))
        dosage = (resource.get('dosage') or resource.get('dosageInstruction'))[0]
        quantity = dosage.get('doseAndRate', [{}])[0].get('doseQuantity', {})
        print(f'{dose}: {resource["resourceType"]}, every {dosage["timing"]["repeat"]["period"]} h,',
              'dose', quantity.get('value'), quantity.get('unit'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

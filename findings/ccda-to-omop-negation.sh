#!/usr/bin/env bash
# ccda-to-omop records a problem that a patient does not have, and results below a limit without
# their limit.
#
# Packages: ccda-to-omop 2.0.4, typeguard 4.6.1 and lxml 6.1.3 (which it imports and does not ask
#   for), pandas 2.3.3, numpy 2.4.6.
# Behaviour: in a C-CDA document negationInd="true" turns a statement round: the patient does not
#   have diabetes, the vaccine was not given. The converter does not read the attribute, so the
#   person gets the condition or the dose like anybody else. A result such as < 0.5 mg/dL (IVL_PQ)
#   becomes a measurement without value, unit and operator; OMOP has operator_concept_id for it,
#   which is always 0.
# Expected: no row in condition_occurrence or drug_exposure for a negated statement; value 0.5 with
#   the operator <.
# Instead: drop the negated entries before the conversion, and read intervals by hand.
# Source: C-CDA 2.1, Problem Observation and Immunization Activity; OMOP CDM 5.4, measurement.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ccda-to-omop==2.0.4' 'typeguard==4.6.1' 'pandas==2.3.3' 'numpy==2.4.6' 'lxml==6.1.3'
cat > expected.txt <<'EXPECTED'
stated: hypertension; no diabetes; hepatitis B vaccine not given; C reactive protein 5.4 and < 0.5 mg/dL
measurement: C reactive protein, operator 0, value 5.4, unit mg/dL
measurement: C reactive protein, operator 0, value None, unit None
condition: hypertension
condition: diabetes
drug: hepatitis B vaccine
EXPECTED
env/bin/python -W ignore - > seen.txt 2> messages.txt <<'PYTHON'
import logging

from ccda_to_omop import data_driven_parse, value_transformations
from ccda_to_omop.metadata import get_meta_dict

logging.disable(logging.CRITICAL)
SNOMED, LOINC, CVX = '2.16.840.1.113883.6.96', '2.16.840.1.113883.6.1', '2.16.840.1.113883.12.292'
CODES = {
    (SNOMED, '38341003'): (316866, 'Condition', 'hypertension'),
    (SNOMED, '73211009'): (201820, 'Condition', 'diabetes'),
    (LOINC, '1988-5'): (3020460, 'Measurement', 'C reactive protein'),
    (CVX, '08'): (40213152, 'Drug', 'hepatitis B vaccine'),
}
value_transformations.set_codemap_dict({
    key: [{'source_concept_id': concept, 'target_concept_id': concept, 'target_domain_id': domain}]
    for key, (concept, domain, _) in CODES.items()
})
names = {concept: name for concept, _, name in CODES.values()}


def section(template, *entries):
    body = ''.join(f'<entry>{entry}</entry>' for entry in entries)
    return f'<component><section><templateId root="{template}"/>{body}</section></component>'


def problem(code, negated):
    return f'''<act classCode="ACT" moodCode="EVN"><entryRelationship typeCode="SUBJ">
      <observation classCode="OBS" moodCode="EVN" negationInd="{negated}">
      <id root="1.2.3" extension="{code}"/><statusCode code="completed"/>
      <effectiveTime><low value="20260315"/></effectiveTime>
      <value xsi:type="CD" code="{code}" codeSystem="{SNOMED}"/>
      </observation></entryRelationship></act>'''


def vaccination(code, negated):
    return f'''<substanceAdministration classCode="SBADM" moodCode="EVN" negationInd="{negated}">
      <id root="1.2.4" extension="{negated}"/><statusCode code="completed"/>
      <effectiveTime value="20260315"/><consumable><manufacturedProduct><manufacturedMaterial>
      <code code="{code}" codeSystem="{CVX}"/>
      </manufacturedMaterial></manufacturedProduct></consumable></substanceAdministration>'''


def result(number, value):
    return f'''<organizer classCode="BATTERY" moodCode="EVN"><component>
      <observation classCode="OBS" moodCode="EVN"><id root="1.2.5" extension="{number}"/>
      <code code="1988-5" codeSystem="{LOINC}"/><statusCode code="completed"/>
      <effectiveTime value="20260315"/>{value}</observation></component></organizer>'''


measured = '<value xsi:type="PQ" value="5.4" unit="mg/dL"/>'
below = '<value xsi:type="IVL_PQ"><high value="0.5" unit="mg/dL" inclusive="false"/></value>'
document = f'''<ClinicalDocument xmlns="urn:hl7-org:v3"
  xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
  <recordTarget><patientRole><id root="9.9" extension="1"/><patient>
  <administrativeGenderCode code="F" codeSystem="2.16.840.1.113883.5.1"/>
  <birthTime value="19800101"/></patient></patientRole></recordTarget>
  <component><structuredBody>
  {section('2.16.840.1.113883.10.20.22.2.5.1', problem('38341003', 'false'),
           problem('73211009', 'true'))}
  {section('2.16.840.1.113883.10.20.22.2.2.1', vaccination('08', 'true'))}
  {section('2.16.840.1.113883.10.20.22.2.3.1',
           result(1, measured), result(2, below))}
  </structuredBody></component></ClinicalDocument>'''
print('stated: hypertension; no diabetes; hepatitis B vaccine not given; '
      'C reactive protein 5.4 and < 0.5 mg/dL')
tables = data_driven_parse.parse_string(document, 'visit.xml', get_meta_dict())
for rows in tables.values():
    for row in rows or []:
        for table in ('condition', 'drug', 'measurement'):
            if concept := row.get(f'{table}_concept_id'):
                extra = [row.get(key) for key in ('operator_concept_id', 'value_as_number',
                                                  'unit_source_value')]
                text = f', operator {extra[0]}, value {extra[1]}, unit {extra[2]}'
                print(f'{table}: {names[int(concept)]}{text if table == "measurement" else ""}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# flat-fhir writes pounds, inches and degrees Fahrenheit into columns of kg, cm and °C.
#
# Packages: flat-fhir 0.1.4, pandas 2.3.3, numpy 2.4.6, openpyxl 3.1.5, requests 2.34.2.
# Behaviour: the columns of flat-fhir have "the unit appended" to their names. A value gets its
#   column by its LOINC code alone. FHIR's profiles of vital signs allow kg, g and [lb_av] for a
#   weight, cm and [in_i] for a height, and Cel and [degF] for a temperature, all with one LOINC
#   code. The number is written as it is, the unit is dropped, and to_fhir gives it the unit of the
#   column. A comparator, as in < 0.01, is dropped as well.
# Expected: 69.9 kg for 154 pounds, or a column for each unit.
# Why it matters here: a newborn of 3450 g and an adult of 154 lb are in one column of kilograms.
# Instead: convert valueQuantity by its UCUM code first.
# Source: FHIR R4, Vital Signs Profiles, the units that are required for each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.4.6' 'openpyxl==3.1.5' 'requests==2.34.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'flat-fhir==0.1.4'
cat > expected.txt <<'EXPECTED'
weight 154 [lb_av]: body_weight_kg 154, back as 154 kg; right 69.85
weight 3450 g: body_weight_kg 3450, back as 3450 kg; right 3.45
height 68 [in_i]: body_height_cm 68, back as 68 cm; right 172.72
temperature 98.6 [degF]: body_temperature_c 98.6, back as 98.6 Cel; right 37.00
weight 70 kg: body_weight_kg 70, back as 70 kg; right 70.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from flat_fhir.core import FlatFHIR

measured = [('weight', '29463-7', 154, '[lb_av]', 154 * 0.45359237), ('weight', '29463-7', 3450, 'g', 3.45),
            ('height', '8302-2', 68, '[in_i]', 68 * 2.54), ('temperature', '8310-5', 98.6, '[degF]', 37.0),
            ('weight', '29463-7', 70, 'kg', 70)]
for name, code, value, unit, right in measured:
    observation = {
        'resourceType': 'Observation', 'id': 'o', 'status': 'final', 'subject': {'reference': 'Patient/p'},
        'category': [{'coding': [{'system': 'http://terminology.hl7.org/CodeSystem/observation-category',
                                  'code': 'vital-signs'}]}],
        'code': {'coding': [{'system': 'http://loinc.org', 'code': code}]}, 'effectiveDateTime': '2026-03-01T08:00:00Z',
        'valueQuantity': {'value': value, 'unit': unit, 'system': 'http://unitsofmeasure.org', 'code': unit}}
    flat = FlatFHIR({'resourceType': 'Bundle', 'type': 'collection', 'entry': [{'resource': observation}]})
    column = flat.vitals.columns[-1]
    back = flat.to_fhir()['entry'][0]['resource']['valueQuantity']
    print(f'{name} {value} {unit}: {column} {flat.vitals[column][0]:g}, back as {back["value"]:g} {back["unit"]};',
          f'right {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# fhir-agent-tools drops the unit and the comparator of each quantity.
#
# Packages: fhir-agent-tools 0.1.0, fhir.resources 8.3.0, fhir-core 1.1.12, pydantic 2.14.4.
# Behaviour: get_observation_summary "extracts key fields", and returns the number of valueQuantity
#   alone. No other function returns the unit. A result below or above the range of the device,
#   which FHIR states with a comparator, becomes a measured one. get_medication_request_summary does
#   the same to a dose, so that 250 micrograms and 250 milligrams are one dose.
# Expected: value, comparator and unit, which together are the quantity in FHIR: the comparator is a
#   modifier element.
# Instead: read valueQuantity and doseQuantity from the resource.
# Source: FHIR R4, Quantity.comparator: "How the value should be understood and represented".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fhir-core==1.1.12' 'fhir.resources==8.3.0' 'pydantic==2.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fhir-agent-tools==0.1.0'
cat > expected.txt <<'EXPECTED'
99 mg/dL: summary 99, value 99; unit in the summary: False
5.5 mmol/L: summary 5.5, value 5.5; unit in the summary: False
0.01 ng/mL: summary 0.01, value 0.01; unit in the summary: False
<0.01 ng/mL: summary 0.01, value 0.01; unit in the summary: False
>5000 U/L: summary 5000, value 5000; unit in the summary: False
250 ug: [{'text': None, 'route': '', 'dose': '250'}]
250 mg: [{'text': None, 'route': '', 'dose': '250'}]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fhir_agent_tools.medication_request import get_medication_request_summary
from fhir_agent_tools.observation import get_observation_summary, get_observation_value

quantities = [('2345-7', {'value': 99, 'unit': 'mg/dL'}), ('14749-6', {'value': 5.5, 'unit': 'mmol/L'}),
              ('6598-7', {'value': 0.01, 'unit': 'ng/mL'}),
              ('6598-7', {'value': 0.01, 'unit': 'ng/mL', 'comparator': '<'}),
              ('2157-6', {'value': 5000, 'unit': 'U/L', 'comparator': '>'})]
for code, quantity in quantities:
    observation = {'resourceType': 'Observation', 'status': 'final', 'valueQuantity': quantity,
                   'code': {'coding': [{'system': 'http://loinc.org', 'code': code}]}}
    summary = get_observation_summary(observation)['data']
    value = get_observation_value(observation)['data']
    given = f'{quantity.get("comparator", "")}{quantity["value"]} {quantity["unit"]}'
    print(f'{given}: summary {summary["value"]}, value {value};',
          f'unit in the summary: {quantity["unit"] in str(summary)}')
for unit in ('ug', 'mg'):
    request = {'resourceType': 'MedicationRequest', 'status': 'active', 'intent': 'order',
               'subject': {'reference': 'Patient/p'}, 'medicationCodeableConcept': {'text': 'Digoxin'},
               'dosageInstruction': [{'doseAndRate': [{'doseQuantity': {'value': 250, 'unit': unit}}]}]}
    print(f'250 {unit}:', get_medication_request_summary(request)['data']['dosageInstruction'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

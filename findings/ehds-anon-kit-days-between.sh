#!/usr/bin/env bash
# ehds-anon-kit shifts each date of a patient by another number of days, so intervals are random.
#
# Packages: ehds-anon-kit 0.1.0, pydantic 2.13.4, PyYAML 6.0.3.
# Behaviour: the shift is described as seeded by the pseudonym of the patient, so that all dates of a
#   patient move together. The seed is the pseudonym of the observation or the encounter. A
#   measurement of a stay of three days is then months before or after the stay, values of a course
#   change their order, and the days between them are noise of up to 180 days. An effectivePeriod,
#   which has two dates, is not shifted at all.
# Expected: the same number of days for all resources of one patient.
# Why it matters here: survival times and courses are learned from the days between dates.
# Instead: shift the dates by a function of the patient before the bundle is anonymised, and set
#   date_shift_days_range to 0.
# Source: the package's own description of its shift, and Regulation (EU) 2025/327, recital 71.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pydantic==2.13.4' 'PyYAML==6.0.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ehds-anon-kit==0.1.0'
cat > expected.txt <<'EXPECTED'
days from the start of the stay:
  creatinine-10: 0 in the record, -6 in the anonymised one
  creatinine-11: 1 in the record, 80 in the anonymised one
  creatinine-12: 2 in the record, 33 in the anonymised one
period of the course: {'start': '2025-03-10', 'end': '2025-03-12'}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from ehds_anon.fhir_anon import anonymize_bundle
from ehds_anon.profiles import load_profile
from ehds_anon.pseudonymisation import PseudonymGenerator

subject = {'reference': 'Patient/p1'}
stay = {'resourceType': 'Encounter', 'id': 'stay', 'subject': subject,
        'period': {'start': '2025-03-10', 'end': '2025-03-13'}}
values = [{'resourceType': 'Observation', 'id': f'creatinine-{day}', 'subject': subject,
           'effectiveDateTime': f'2025-03-{day}'} for day in (10, 11, 12)]
course = {'resourceType': 'Observation', 'id': 'course', 'subject': subject,
          'effectivePeriod': {'start': '2025-03-10', 'end': '2025-03-12'}}
resources = [{'resourceType': 'Patient', 'id': 'p1', 'birthDate': '1950-05-02'}, stay, *values, course]
bundle = {'resourceType': 'Bundle', 'entry': [{'resource': one} for one in resources]}
result = anonymize_bundle(bundle, load_profile('ehds-secondary-default'), PseudonymGenerator('a key')).bundle
found = [entry['resource'] for entry in result['entry']]
start = date.fromisoformat(found[1]['period']['start'])
print('days from the start of the stay:')
for before, after in zip(values, found[2:5]):
    days = [(date.fromisoformat(one['effectiveDateTime']) - first).days
            for one, first in ((before, date(2025, 3, 10)), (after, start))]
    print(f'  {before["id"]}: {days[0]} in the record, {days[1]} in the anonymised one')
print('period of the course:', found[5]['effectivePeriod'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

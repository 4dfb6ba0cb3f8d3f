#!/usr/bin/env bash
# fhir-helpers completes a date of birth like "1980" with the month and the day on which the program runs: the patient has a
# birthday each day, and a disease since "2020" is before or behind a date depending on the day of the question.
#
# Packages: fhir-helpers 0.12.0, fhir-types 0.2.4, python-dateutil 2.9.0.post0, six 1.17.0.
# Behaviour: dates go to the parser of dateutil, which takes what is missing from the date of today. PatientDict.birthdate,
#   recorded_date of ConditionDict, sort_by_date, find_after_date and find_before_date use it.
# Expected: a date of FHIR may be YYYY or YYYY-MM and says no more than that. A fixed day of the period, its bounds, or no
#   date, but the same one tomorrow.
# Why it matters here: a table of a study made on two days has two different ages, orders and counts.
# Instead: complete the text before, for instance with "-07-01" or "-15".
# Source: hl7.org/fhir/R4/datatypes.html#date: "YYYY, YYYY-MM, or YYYY-MM-DD".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-dateutil==2.9.0.post0' 'six==1.17.0' 'fhir-types==0.2.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fhir-helpers==0.12.0'
cat > expected.txt <<'EXPECTED'
born 1980: year 1980 - month and day are those of today: True - age is the difference of the years: True
born 1980-02-03: 1980-02-03
disease recorded 2020: month and day are those of today: True
found after the day before today of 2020: True - found after today of 2020: False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date, datetime, timedelta, timezone
from fhir_helpers.resources.condition import ConditionDict, Conditions
from fhir_helpers.resources.patient import PatientDict

today = date.today()
patient = PatientDict({'resourceType': 'Patient', 'birthDate': '1980'})
print('born 1980: year', patient.birthdate.year, '- month and day are those of today:',
      (patient.birthdate.month, patient.birthdate.day) == (today.month, today.day),
      '- age is', 'the difference of the years:', patient.age == today.year - 1980)
full = PatientDict({'resourceType': 'Patient', 'birthDate': '1980-02-03'})
print('born 1980-02-03:', full.birthdate)
condition = ConditionDict({'resourceType': 'Condition', 'recordedDate': '2020'})
print('disease recorded 2020: month and day are those of today:',
      (condition.recorded_date.month, condition.recorded_date.day) == (today.month, today.day))
now = datetime(2020, today.month, today.day, tzinfo=timezone.utc)
print('found after the day before today of 2020:', Conditions([condition]).find_after_date(now - timedelta(days=1)).exists(),
      '- found after today of 2020:', Conditions([condition]).find_after_date(now + timedelta(hours=1)).exists())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

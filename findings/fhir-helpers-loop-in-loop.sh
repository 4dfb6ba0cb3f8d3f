#!/usr/bin/env bash
# The lists of fhir-helpers lose their place where two loops go over one of them: a loop over the pairs of four observations
# visits the pairs of the first one and ends.
#
# Packages: fhir-helpers 0.12.0, fhir-types 0.2.4, python-dateutil 2.9.0.post0, six 1.17.0.
# Behaviour: iter() of a ResourceList sets its counter to 0 and returns the list itself. Two loops over one list share the
#   counter, and so do a loop and a sum(), an "in" or a list() within it. No error and no warning.
# Expected: what a list does: each loop has its own place.
# Why it matters here: to look for each prescription whether another one follows, or for each value whether a later one is
#   higher, is what such a list is for. Only the first one is checked.
# Instead: loop over .all(), which is a plain list.
# Source: all pairs of a plain list of the same observations; the iterator protocol, which asks for a fresh iterator.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-dateutil==2.9.0.post0' 'six==1.17.0' 'fhir-types==0.2.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fhir-helpers==0.12.0'
cat > expected.txt <<'EXPECTED'
pairs in a plain list: 16
pairs in the list of fhir-helpers: 4
later values that are higher, plain list: [(7.1, 8.0), (7.1, 7.5), (6.4, 8.0), (6.4, 7.5)]
later values that are higher, list of fhir-helpers: [(7.1, 8.0), (7.1, 7.5)]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fhir_helpers.resources.lpr import LPR

values = [7.1, 6.4, 8.0, 7.5]
record = LPR({'resourceType': 'Bundle', 'entry': [
    {'resource': {'resourceType': 'Observation', 'effectiveDateTime': f'2024-0{month}-10',
                  'code': {'coding': [{'system': 'http://loinc.org', 'code': '4548-4'}]},
                  'valueQuantity': {'value': value, 'unit': '%'}}} for month, value in enumerate(values, 1)]})


def rises(observations):
    return [(first.value.value_quantity.value, second.value.value_quantity.value) for first in observations
            for second in observations if second.effective_datetime > first.effective_datetime
            and second.value.value_quantity.value > first.value.value_quantity.value]


print('pairs in a plain list:', len([1 for _ in record.observations.all() for _ in record.observations.all()]))
print('pairs in the list of fhir-helpers:', len([1 for _ in record.observations for _ in record.observations]))
print('later values that are higher, plain list:', rises(record.observations.all()))
print('later values that are higher, list of fhir-helpers:', rises(record.observations))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

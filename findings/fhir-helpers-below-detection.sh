#!/usr/bin/env bash
# fhir-helpers takes "less than 20" for 20: a viral load that the laboratory reports as below its limit is found by gte(20)
# and not by lt(20).
#
# Packages: fhir-helpers 0.12.0, fhir-types 0.2.4, python-dateutil 2.9.0.post0, six 1.17.0.
# Behaviour: the queries eq, gt, gte, lt and lte compare the number of a quantity and never read its comparator. There is
#   no property for it either, so that a caller does not see it. "More than 90" is in the same way found by lte(90).
# Expected: lt(20) finds "less than 20", and gte(20) does not. R4 marks the comparator as a modifier element, one that
#   "might change the meaning" of the element that has it and may not be passed over.
# Why it matters here: suppressed patients are reported as unsuppressed, and a filtration rate of "> 90" as not above 90.
# Instead: read observation.data['valueQuantity'].get('comparator') and decide by hand.
# Source: hl7.org/fhir/R4/datatypes.html#Quantity, comparator ("Is Modifier").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-dateutil==2.9.0.post0' 'six==1.17.0' 'fhir-types==0.2.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fhir-helpers==0.12.0'
cat > expected.txt <<'EXPECTED'
value "<20" compared with 20: found by ['lte', 'eq', 'gte'], expected ['lt', 'lte']
value "20" compared with 20: found by ['lte', 'eq', 'gte'], expected ['lte', 'eq', 'gte']
value ">90" compared with 90: found by ['lte', 'eq', 'gte'], expected ['gte', 'gt']
value "15" compared with 20: found by ['lt', 'lte'], expected ['lt', 'lte']
a property for the comparator: False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fhir_helpers.resources.lpr import LPR


def one(value, comparator=None):
    quantity = {'value': value} | ({'comparator': comparator} if comparator else {})
    entry = {'resource': {'resourceType': 'Observation', 'code': {'coding': [{'code': 'x'}]}, 'valueQuantity': quantity}}
    return LPR({'resourceType': 'Bundle', 'entry': [entry]}).observations


def found(observations, limit):
    return [name for name in ('lt', 'lte', 'eq', 'gte', 'gt') if getattr(observations, name)(limit).exists()]


for value, comparator, limit, expected in ((20, '<', 20, ['lt', 'lte']), (20, None, 20, ['lte', 'eq', 'gte']),
                                           (90, '>', 90, ['gte', 'gt']), (15, None, 20, ['lt', 'lte'])):
    print(f'value "{comparator or ""}{value}" compared with {limit}: found by {found(one(value, comparator), limit)}, '
          f'expected {expected}')
print('a property for the comparator:', hasattr(one(20, '<').first().value.value_quantity, 'comparator'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

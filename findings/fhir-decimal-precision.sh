#!/usr/bin/env bash
# fhir.resources reads FHIR decimals through a double: digits and stated precision are lost.
#
# Packages: fhir.resources 8.3.0, pydantic 2.14.4.
# Behaviour: FHIR asks that a decimal keep its precision (a potassium of 1.10 was measured to two
#   places). The value becomes a Decimal, but of the double: 1.10 comes back as 1.1, and a number of
#   23 digits is rounded to 17 and written with zeros in their place.
# Expected: Decimal('1.10'), and the same text when the resource is written again.
# Instead: read such values with json.loads(..., parse_float=decimal.Decimal).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fhir.resources==8.3.0' 'pydantic==2.14.4'
cat > expected.txt <<'EXPECTED'
1.10 -> Decimal('1.1') -> {"value":1.1,"unit":"mmol/L"}
12345678901234567890.123 -> Decimal('1.2345678901234567E+19') -> {"value":12345678901234567000,"unit":"mmol/L"}
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
from fhir.resources.quantity import Quantity

for text in ('1.10', '12345678901234567890.123'):
    quantity = Quantity.model_validate_json('{"value": %s, "unit": "mmol/L"}' % text)
    print(text, '->', repr(quantity.value), '->', quantity.model_dump_json())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

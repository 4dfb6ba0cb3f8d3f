#!/usr/bin/env bash
# fhirpathpy divides towards zero and takes remainders towards minus infinity, and cannot compare two
# quantities.
#
# Packages: fhirpathpy 2.2.4.
# Behaviour: -7 div 2 is -3 and -7 mod 2 is 1, although the dividend is the quotient times the divisor
#   plus the remainder: -3 * 2 + 1 is -5. With a decimal the remainder has the other sign. round
#   without a precision, which is optional, is an error, and with 0 it rounds halves to even. 3 'kg'
#   > 2 'kg' ends in a TypeError, so filters on measured values cannot be written with units.
# Expected: -1, 3, and true. Comparing quantities of one unit is required.
# Instead: compare value and unit by themselves: value.value > 2 and value.code = 'kg'.
# Source: FHIRPath N1 (ANSI), 6.6.6 mod, 5.7.8 round, 6.2 comparison.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fhirpathpy==2.2.4'
cat > expected.txt <<'EXPECTED'
-7 div 2 -> [-3]
-7 mod 2 -> [1]
-7.5 mod 2 -> ['-1.5']
2.5.round(0) -> ['2']
2.5.round() -> Exception
3 'kg' = 3 'kg' -> [True]
3 'kg' > 2 'kg' -> TypeError
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fhirpathpy import evaluate

for text in (
    '-7 div 2', '-7 mod 2', '-7.5 mod 2', '2.5.round(0)', '2.5.round()', "3 'kg' = 3 'kg'",
    "3 'kg' > 2 'kg'",
):
    try:
        found = [x if isinstance(x, (bool, int)) else str(x) for x in evaluate({}, text)]
        print(text, '->', found)
    except Exception as error:
        print(text, '->', type(error).__name__)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

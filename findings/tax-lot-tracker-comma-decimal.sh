#!/usr/bin/env bash
# tax-lot-tracker reads a decimal comma before three digits as a separator of thousands, after a zero as well.
#
# Packages: tax-lot-tracker 0.1.0, python-dateutil 2.9.0.post0.
# Behaviour: parse_decimal reads European numbers, "0,5" as 0.5 and "1.234,5" as 1234.5. With three digits
#   after the comma it takes the comma for a separator of thousands: "0,125" is 125 and "-0,125" is -125,
#   though no number with thousands begins with a zero. "0,12" and "0,1250" are right.
# Expected: 0.125.
# Instead: replace the comma by a point before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tax-lot-tracker==0.1.0' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
0,5: 0.5, by hand 0.5
0,12: 0.12, by hand 0.12
0,125: 125, by hand 0.125
-0,125: -125, by hand -0.125
0,1250: 0.125, by hand 0.125
00,125: 125, by hand 0.125
1.234,5: 1234.5, by hand 1234.5
1,234: 1234, by hand 1234
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tax_lot_tracker.utils import parse_decimal

for text, hand in (('0,5', 0.5), ('0,12', 0.12), ('0,125', 0.125), ('-0,125', -0.125), ('0,1250', 0.125),
                   ('00,125', 0.125), ('1.234,5', 1234.5), ('1,234', 1234)):
    print(f'{text}: {float(parse_decimal(text)):g}, by hand {hand:g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

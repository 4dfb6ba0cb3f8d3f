#!/usr/bin/env bash
# fitout repairs values that are out of range with other values that are out of range: of two wrong heart rates of 0 the first
# becomes 30, with a lower limit of 40, and the first and the last value of a list are never repaired.
#
# Packages: fitout 0.3.1.
# Behaviour: fix_invalid_data_points takes the mean of the two neighbours, whether these are valid or not. Its loop starts
#   at the second value and ends at the last but one, so that the branches for the ends, which it has, are never reached.
#   The list of the caller is changed.
# Expected: no value outside of the limits afterwards, as in "replaces out-of-range values in a list".
# Why it matters here: a watch that loses contact reports several zeros in a row, and often at the end.
# Instead: set what is out of range to None and interpolate between the valid values.
# Source: the limits of the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fitout==0.3.1'
cat > expected.txt <<'EXPECTED'
[60, 0, 62, 63]: [60, 61.0, 62, 63]; outside 40 to 200: []; same list: True
[60, 0, 0, 66]: [60, 30.0, 48.0, 66]; outside 40 to 200: [30.0]; same list: True
[60, 250, 250, 250, 64]: [60, 155.0, 202.5, 133.25, 64]; outside 40 to 200: [202.5]; same list: True
[0, 61, 62, 0]: [0, 61, 62, 0]; outside 40 to 200: [0, 0]; same list: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from fitout import fix_invalid_data_points

for values in ([60, 0, 62, 63], [60, 0, 0, 66], [60, 250, 250, 250, 64], [0, 61, 62, 0]):
    before = list(values)
    after = fix_invalid_data_points(values, 40, 200)
    print(f'{before}: {after}; outside 40 to 200: {[value for value in after if not 40 <= value <= 200]}; '
          f'same list: {after is values}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# OpenDP casts the texts "false" and "0" to True, and the text "54.0" to the whole number 0.
#
# Packages: opendp 0.16.0.
# Behaviour: make_cast_default and make_cast take any text that is not empty for True. For whole
#   numbers, a text with a decimal point or a space cannot be read and becomes the default, 0,
#   though the same text is a float. The private count or mean that follows gives no hint.
# Expected: "false" and "0" are False, or the default; "54.0" is 54.
# Instead: compare booleans with make_is_equal(value='true'); cast numbers to float first, then to
#   int.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'opendp==0.16.0'
cat > expected.txt <<'EXPECTED'
bool: "true" True, "false" True, "False" True, "0" True, "no" True, "" False,
int: "54" 54, "54.0" 0, " 54" 0, "54 " 0,
float: "54" 54.0, "54.0" 54.0,
is_equal "true": [True, False]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import opendp.prelude as dp

dp.enable_features('contrib')
space = dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance()
for kind, texts in (
    (bool, ['true', 'false', 'False', '0', 'no', '']),
    (int, ['54', '54.0', ' 54', '54 ']),
    (float, ['54', '54.0']),
):
    cast = space >> dp.t.then_cast_default(TOA=kind)
    print(f'{kind.__name__}:', *(f'"{text}" {value},' for text, value in zip(texts, cast(texts))))
smoker = space >> dp.t.then_is_equal(value='true')
print('is_equal "true":', smoker(['true', 'false']))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

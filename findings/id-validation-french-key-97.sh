#!/usr/bin/env bash
# id-validation calls one of 97 French social security numbers invalid, since their key is 97, and accepts 00 in its place,
# which no number has.
#
# Packages: id-validation 0.6.1, typing-extensions 4.16.0 (which it imports and does not ask for),
#   python-stdnum 2.2.
# Behaviour: the key is 97 minus the remainder of the first thirteen digits by 97, from 1 to 97. Where the remainder is 0
#   the package replaces the key of 97 by 0.
# Expected: key 97, as the rule of INSEE gives it and python-stdnum has it.
# Why it matters here: 1 % of the people are dropped from a table as errors of typing.
# Instead: python-stdnum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'id-validation==0.6.1' 'typing-extensions==4.16.0' 'python-stdnum==2.2'
cat > expected.txt <<'EXPECTED'
2850578006028 97: id-validation False, python-stdnum True
2850578006028 00: id-validation True, python-stdnum False
2850578006125 97: id-validation False, python-stdnum True
2850578006125 00: id-validation True, python-stdnum False
970 numbers with the right key: 10 are rejected, and 10 are accepted with 00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from id_validation import ValidatorFactory
from stdnum.fr import nir

validator = ValidatorFactory.get_validator('FR')
rejected = accepted = 0
numbers = [f'2850578006{order:03}' for order in range(1, 971)]
for body in numbers:
    key = 97 - int(body) % 97
    assert nir.is_valid(f'{body}{key:02}') and not nir.is_valid(f'{body}00')
    if not validator.validate(f'{body}{key:02}'):
        rejected += 1
        if rejected <= 2:
            print(f'{body} {key:02}: id-validation False, python-stdnum True')
    if validator.validate(f'{body}00'):
        accepted += 1
        if accepted <= 2:
            print(f'{body} 00: id-validation True, python-stdnum False')
print(f'{len(numbers)} numbers with the right key: {rejected} are rejected, and {accepted} are accepted with 00')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# id-validation calls the Italian tax codes of people with the same name and birthday invalid: the letters that tell them
# apart are not digits.
#
# Packages: id-validation 0.6.1, typing-extensions 4.16.0 (which it imports and does not ask for),
#   python-stdnum 2.2.
# Behaviour: where two people have the same code, digits of one of them are replaced by letters from the right (0 L, 1 M,
#   2 N, 3 P, 4 Q, 5 R, 6 S, 7 T, 8 U, 9 V). The package asks for digits in these places.
# Expected: True, and the birthday behind the letters, as python-stdnum returns them.
# Why it matters here: the people whose code is made to tell them from a namesake are the ones that a record linkage
#   needs it for.
# Instead: python-stdnum.
# Source: Decreto ministeriale of 23 December 1976 on the numbers of tax payers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'id-validation==0.6.1' 'typing-extensions==4.16.0' 'python-stdnum==2.2'
cat > expected.txt <<'EXPECTED'
RCCMNL83S18D969H: id-validation True, python-stdnum True, born 1983-11-18
RCCMNL83S18D96VW: id-validation False, python-stdnum True, born 1983-11-18
RCCMNL83S18D9SVI: id-validation False, python-stdnum True, born 1983-11-18
RCCMNL83S18DVSVX: id-validation False, python-stdnum True, born 1983-11-18
RCCMNL83S1UDVSVU: id-validation False, python-stdnum True, born 1983-11-18
RCCMNL83SMUDVSVF: id-validation False, python-stdnum True, born 1983-11-18
RCCMNL8PSMUDVSVR: id-validation False, python-stdnum True, born 1983-11-18
RCCMNLUPSMUDVSVO: id-validation False, python-stdnum True, born 1983-11-18
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from id_validation import ValidatorFactory
from stdnum.it import codicefiscale

LETTERS = dict(zip('0123456789', 'LMNPQRSTUV'))
validator = ValidatorFactory.get_validator('IT')
code = 'RCCMNL83S18D969'
for place in (None, 14, 13, 12, 10, 9, 7, 6):
    if place is not None:
        code = code[:place] + LETTERS[code[place]] + code[place + 1:]
    full = code + codicefiscale.calc_check_digit(code)
    print(f'{full}: id-validation {validator.validate(full)}, python-stdnum {codicefiscale.is_valid(full)}, '
          f'born {codicefiscale.get_birth_date(full)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

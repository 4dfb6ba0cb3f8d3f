#!/usr/bin/env bash
# id-validation has each foreigner who lives in Romania born in this century: a number of somebody born in 1985 gives 2085, a
# birthday that is sixty years away.
#
# Packages: id-validation 0.6.1, typing-extensions 4.16.0 (which it imports and does not ask for),
#   python-stdnum 2.2.
# Behaviour: the first digit of a Romanian number tells sex and century, and 7, 8 and 9, for residents who are not
#   Romanian, tell no century. The package takes 2000 for them and does not compare the date with today.
# Expected: a date in the past, as python-stdnum returns it, or no date of birth.
# Why it matters here: ages of -59 years, or people who are taken for children.
# Instead: python-stdnum, or a century less where the date is in the future.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'id-validation==0.6.1' 'typing-extensions==4.16.0' 'python-stdnum==2.2'
cat > expected.txt <<'EXPECTED'
1850312401233: id-validation 1985-03-12, python-stdnum 1985-03-12
5050312401231: id-validation 2005-03-12, python-stdnum 2005-03-12
7850312401234: id-validation 2085-03-12, python-stdnum 1985-03-12
8621130401238: id-validation 2062-11-30, python-stdnum 1962-11-30
8990101401231: id-validation 2099-01-01, python-stdnum 1999-01-01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from id_validation import ValidatorFactory
from stdnum.ro import cnp

WEIGHTS = 2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9
validator = ValidatorFactory.get_validator('RO')
for first, birthday in (('1', date(1985, 3, 12)), ('5', date(2005, 3, 12)), ('7', date(1985, 3, 12)), ('8', date(1962, 11, 30)),
                        ('8', date(1999, 1, 1))):
    digits = f'{first}{birthday:%y%m%d}40123'
    rest = sum(int(digit) * weight for digit, weight in zip(digits, WEIGHTS)) % 11
    number = digits + str(1 if rest == 10 else rest)
    print(f'{number}: id-validation {validator.extract_data(number)["dob"]}, python-stdnum {cnp.get_birth_date(number)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pybtexris takes a number of a journal that ends with X for the number of a book.
#
# Packages: pybtexris 0.2.0, pybtex 0.26.1, setuptools 80.9.0, python-stdnum 2.1 (checks the numbers).
# Behaviour: the tag SN holds an ISSN or an ISBN, and pybtexris counts the digits to tell them apart:
#   eight are an ISSN. The last character of an ISSN is a check digit, which is X for 10, so that one in
#   eleven journals has seven digits and an X and gets an ISBN that is not valid.
# Expected: issn for 1050-124X, as for 0028-0836.
# Instead: look for the form of an ISSN, four digits, a dash, three digits and a digit or an X.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pybtexris==0.2.0' 'pybtex==0.26.1' 'setuptools==80.9.0' 'python-stdnum==2.1'
cat > expected.txt <<'EXPECTED'
0028-0836: valid ISSN True, valid ISBN False; pybtexris: issn
1050-124X: valid ISSN True, valid ISBN False; pybtexris: isbn
978-3-16-148410-0: valid ISSN False, valid ISBN True; pybtexris: isbn
of 1100 valid ISSN: {'issn': 1000, 'isbn': 100}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from collections import Counter

from pybtexris import RISParser
from stdnum import isbn, issn


def field(number):
    text = f'TY  - JOUR\nAU  - Miller, Anna\nTI  - Sleep of nurses\nSN  - {number}\nER  -\n'
    (entry,) = RISParser().parse_string(text).entries.values()
    return ' and '.join(name for name in ('issn', 'isbn') if name in entry.fields)


for number in ('0028-0836', '1050-124X', '978-3-16-148410-0'):
    print(f'{number}: valid ISSN {issn.is_valid(number)}, valid ISBN {isbn.is_valid(number)};',
          f'pybtexris: {field(number)}')
seen = Counter()
for first in range(1000, 2100):
    digits = f'{first}001'
    seen[field(issn.format(digits + issn.calc_check_digit(digits)))] += 1
print('of 1100 valid ISSN:', dict(seen))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

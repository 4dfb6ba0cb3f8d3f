#!/usr/bin/env bash
# Two tax numbers of tax-identifiers are equal and unequal at the same time.
#
# Packages: tax-identifiers 0.1.0.
# Behaviour: ComparableUsTaxIdentifier compares by its digits, so that a number with dashes equals the same number
#   without them. It sets the test for equality and not the one for inequality, which stays the comparison of
#   the texts: a == b and a != b are both true. A check with != reports a change where there is none.
# Expected: a != b is not (a == b).
# Instead: write not (a == b).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tax-identifiers==0.1.0'
cat > expected.txt <<'EXPECTED'
same text: == True, != False; by the digits True and False
no dashes: == True, != True; by the digits True and False
plain text: == True, != True; by the digits True and False
other number: == False, != True; by the digits False and True
numbers reported as changed: 2 of 2, by hand 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tax_identifiers import ComparableUsTaxIdentifier

first = ComparableUsTaxIdentifier('123-45-6789')
for name, second in (('same text', ComparableUsTaxIdentifier('123-45-6789')),
                     ('no dashes', ComparableUsTaxIdentifier('123456789')), ('plain text', '123456789'),
                     ('other number', ComparableUsTaxIdentifier('123-45-6780'))):
    same = first.replace('-', '') == str(second).replace('-', '')
    print(f'{name}: == {first == second}, != {first != second}; by the digits {same} and {not same}')
old, new = ['123-45-6789', '987-65-4321'], ['123456789', '987654321']
changed = [number for number, other in zip(map(ComparableUsTaxIdentifier, old), new) if number != other]
print(f'numbers reported as changed: {len(changed)} of {len(old)}, by hand 0')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

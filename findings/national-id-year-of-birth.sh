#!/usr/bin/env bash
# The year of birth of national-id has three digits for people born in 2000 to 2009.
#
# Packages: national-id 1.0.3.
# Behaviour: get_info reads an Egyptian national number, whose second and third digit are the year
#   within a century. They are read as a number and written behind 20 or 19, so that 05 becomes "205".
#   Somebody born in July 1903 has the year "193". The number is reported as valid.
# Expected: 2005 and 1903.
# Instead: take the second and the third digit of the number as text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'national-id==1.0.3'
cat > expected.txt <<'EXPECTED'
29801150112345: valid True, born in 1998, by its digits in 1998
31201150112345: valid True, born in 2012, by its digits in 2012
30501150112345: valid True, born in 205, by its digits in 2005
30001150112345: valid True, born in 200, by its digits in 2000
20307150112345: valid True, born in 193, by its digits in 1903
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lib.national_id import NationalID

for number in ('29801150112345', '31201150112345', '30501150112345', '30001150112345', '20307150112345'):
    valid, info = NationalID(number).get_info()
    right = {'2': '19', '3': '20'}[number[0]] + number[1:3]
    print(f'{number}: valid {valid}, born in {info["year_of_birth"]}, by its digits in {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

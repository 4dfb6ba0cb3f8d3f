#!/usr/bin/env bash
# ban-converter turns a Finnish account into another one on the way there and back.
#
# Packages: ban-converter 0.0.2.
# Behaviour: convert_iban_to_bban puts two zeros after the sixth digit, or around the seventh, where
#   the 14 digits of a Finnish BBAN are the ones of the IBAN behind its check digits.
#   convert_bban_to_iban takes two digits out of a number of 16, the fifth and the ninth, which are
#   other ones. The account 123456-785 comes back as 123460-785 under new check digits, which every
#   check accepts. Numbers in the printed form, with a dash, are right.
# Expected: the same IBAN after both conversions.
# Instead: the BBAN is the IBAN from its fifth character on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ban-converter==0.0.2'
cat > expected.txt <<'EXPECTED'
FI2112345600000785, valid True: BBAN 1234560000000785, by hand 12345600000785; back FI0312346000000785, valid True
FI5542345670000081, valid True: BBAN 4234560700000081, by hand 42345670000081; back FI3742346070000081, valid True
from the printed 123456-785: FI2112345600000785
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ban_converter import convert_bban_to_iban, convert_iban_to_bban

def is_valid(iban):
    return int(''.join(str(int(character, 36)) for character in iban[4:] + iban[:4])) % 97 == 1

for iban in ('FI2112345600000785', 'FI5542345670000081'):
    bban = convert_iban_to_bban(iban)
    back = convert_bban_to_iban(bban)
    print(f'{iban}, valid {is_valid(iban)}: BBAN {bban}, by hand {iban[4:]}; back {back}, valid {is_valid(back)}')
print('from the printed 123456-785:', convert_bban_to_iban('123456-785'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

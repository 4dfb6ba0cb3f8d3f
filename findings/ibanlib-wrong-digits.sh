#!/usr/bin/env bash
# ibanlib calls an IBAN with two exchanged digits valid, in each country but Austria, and makes the valid
# IBAN of another account of it.
#
# Packages: ibanlib 0.0.3.
# Behaviour: the check digits are compared for countries whose section in the package's file of countries
#   says so, and one of 41 does. valid() then looks at length and kind of characters only. The account of
#   such an IBAN builds its IBAN anew, with check digits that fit the mistake. Countries without a
#   section, such as Monaco, San Marino and Serbia, are not valid at all.
# Expected: False, the remainder by 97 is what the two digits are for.
# Why it matters here: numbers of accounts link the records of a person, and a typing error that the
#   check digits would show links another person.
# Instead: schwifty.IBAN, or python-stdnum.
# Source: ISO 13616: the number with its first four characters at the end, letters as 10 to 35, leaves 1 when
#   it is divided by 97. The account numbers are the examples of the IBAN registry.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ibanlib==0.0.3'
cat > expected.txt <<'EXPECTED'
AT: by ISO 13616 True and, two digits exchanged, False; ibanlib True and False
BE: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
CH: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
DE: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
ES: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
FR: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
GB: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
IT: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
NL: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
SE: by ISO 13616 True and, two digits exchanged, False; ibanlib True and True
MC: by ISO 13616 True and, two digits exchanged, False; ibanlib False and False
RS: by ISO 13616 True and, two digits exchanged, False; ibanlib False and False
DE89370400440523013000, by ISO 13616 False, becomes DE54370400440523013000, by ISO 13616 True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ibanlib.iban import IntAccount, valid


def check(iban):
    return int(''.join(str(int(letter, 36)) for letter in iban[4:] + iban[:4])) % 97 == 1


EXAMPLES = ('AT611904300234573201', 'BE68539007547034', 'CH9300762011623852957', 'DE89370400440532013000',
            'ES9121000418450200051332', 'FR1420041010050500013M02606', 'GB29NWBK60161331926819',
            'IT60X0542811101000000123456', 'NL91ABNA0417164300', 'SE4550000000058398257466',
            'MC5811222000010123456789030', 'RS35260005601001611379')
for iban in EXAMPLES:
    place = next(index for index in range(len(iban) - 2, 4, -1)
                 if iban[index:index + 2].isdigit() and iban[index] != iban[index + 1])
    mistyped = iban[:place] + iban[place + 1] + iban[place] + iban[place + 2:]
    print(f'{iban[:2]}: by ISO 13616 {check(iban)} and, two digits exchanged, {check(mistyped)}; '
          f'ibanlib {valid(iban)} and {valid(mistyped)}')
mistyped = 'DE89370400440523013000'
account = IntAccount(iban=mistyped)
print(f'{mistyped}, by ISO 13616 {check(mistyped)}, becomes {account.iban}, by ISO 13616 {check(account.iban)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# swiftlib writes each account number of a payment as an IBAN: the account 12345678 of its documented example becomes
# <IBAN>12345678</IBAN>, which the scheme of pain.001 does not allow.
#
# Packages: swiftlib 1.0.1, lxml 6.0.2, pydantic 2.12.5.
# Behaviour: the field 50K and 59 of an MT103 hold an account in any format behind a slash. The converters to pain.001 and
#   pacs.008 always put it into the element IBAN. The converter of statements in the same file looks whether a number
#   begins like an IBAN and uses Othr otherwise.
# Expected: <Othr><Id>12345678</Id></Othr>.
# Instead: move the element by hand where the number is not an IBAN.
# Source: ISO 20022, type IBAN2007Identifier: [A-Z]{2,2}[0-9]{2,2}[a-zA-Z0-9]{1,30}.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'swiftlib==1.0.1' 'lxml==6.0.2' 'pydantic==2.12.5'
cat > expected.txt <<'EXPECTED'
pain.001: <IBAN>12345678</IBAN>, allowed by its type: False
pain.001: <IBAN>98765432</IBAN>, allowed by its type: False
pain.001: account numbers in Othr: 0
pacs.008: <IBAN>12345678</IBAN>, allowed by its type: False
pacs.008: <IBAN>98765432</IBAN>, allowed by its type: False
pacs.008: account numbers in Othr: 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import re

from swiftlib.converters.mt_to_iso import MT103ToPacs008Converter, MT103ToPain001Converter
from swiftlib.mt import parse

# the example of the documentation
MESSAGE = """{1:F01BANKBEBBAXXX0000000000}{2:I103BANKDEFFXXXXU}{4:
:20:FT21099B59YFW001
:23B:CRED
:32A:210101USD10000,
:50K:/12345678
JOHN DOE
123 MAIN ST
:59:/98765432
JANE SMITH
:70:PAYMENT FOR SERVICES
:71A:OUR
-}"""
for name, converter in (('pain.001', MT103ToPain001Converter()), ('pacs.008', MT103ToPacs008Converter())):
    xml = converter.convert(parse(MESSAGE)).to_xml()
    xml = xml.decode() if isinstance(xml, bytes) else xml
    for number in re.findall(r'<IBAN>([^<]*)</IBAN>', xml):
        valid = bool(re.fullmatch('[A-Z]{2}[0-9]{2}[a-zA-Z0-9]{1,30}', number))
        print(f'{name}: <IBAN>{number}</IBAN>, allowed by its type: {valid}')
    print(f'{name}: account numbers in Othr: {len(re.findall("<Othr>", xml))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

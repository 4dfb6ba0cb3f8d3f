#!/usr/bin/env bash
# mt940-py makes Polish accounts in zloty of foreign ones.
#
# Packages: mt940-py 0.1.7, mt-940 5.1.1.
# Behaviour: MT940Converter writes a statement of mBank as MT940. The letters of the other party's
#   account are removed and PL is put before the digits: a German IBAN becomes one with PL and the
#   German check digits, which is valid nowhere. The currency that the file states is not read, so
#   that the balances of an account in euros are in PLN.
# Expected: the IBAN and the currency of the file.
# Instead: keep to payments in Poland, or correct both in the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mt940-py==0.1.7' 'mt-940==5.1.1'
cat > expected.txt <<'EXPECTED'
balances: [':60F:C260105PLN1000,00', ':62F:C260105PLN500,00'] of an account in EUR
account in the file: DE89370400440532013000, remainder by 97: 1
account in the result: PL89370400440532013000, remainder by 97: 33
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from mt940_py.converter import MT940Converter

statement = '''mBank S.A.
#Waluta;
EUR;
#Numer rachunku;
97 1140 2004 0000 3002 0135 5387;
#Saldo początkowe;1 000,00 EUR;

#Data księgowania;#Data operacji;#Opis operacji;#Tytuł;#Nadawca/Odbiorca;#Numer konta;#Kwota;#Saldo po operacji;
2026-01-05;2026-01-05;PRZELEW;RENT;MAX MUSTER;'DE89370400440532013000';-500,00;500,00;
'''


def remainder(iban):
    return int(''.join(str(int(letter, 36)) for letter in iban[4:] + iban[:4])) % 97


text = MT940Converter().convert(statement).replace('\r\n', '\n')
lines = text.split('\n')
print('balances:', [line for line in lines if line.startswith((':60F:', ':62F:'))], 'of an account in EUR')
account = text.split('~38')[1].split(':62F')[0].replace('\n', '')
print('account in the file: DE89370400440532013000, remainder by 97:', remainder('DE89370400440532013000'))
print(f'account in the result: {account}, remainder by 97: {remainder(account)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# ibancheck fills a short account number up with zeros before the bank code.
#
# Packages: ibancheck 0.1.1, setuptools 68.2.2.
# Behaviour: create_iban takes the country and the rest of an IBAN, in its documentation a bank code
#   and an account number. A rest that is too short gets zeros on its left. Account numbers are
#   printed without leading zeros in many countries; the zero belongs between bank code and account.
#   The German account 532013000 at 37040044 becomes account 4532013000 at bank 03704004. The check
#   digits are made for the wrong number, so that is_valid accepts it.
# Expected: an error for a rest of the wrong length.
# Instead: fill the account number up to the length of its country first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ibancheck==0.1.1' 'setuptools==68.2.2'
cat > expected.txt <<'EXPECTED'
bank 37040044, account 532013000: DE02 0370 4004 4532 0130 00, bank 03704004, account 4532013000, valid True; right DE89 3704 0044 0532 0130 00
bank 19043, account 234573201: AT38 0019 0432 3457 3201, bank 00190, account 43234573201, valid True; right AT61 1904 3002 3457 3201
bank ABNA, account 417164300: NL44 0ABN A417 1643 00, bank 0ABN, account A417164300, valid True; right NL91 ABNA 0417 1643 00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ibancheck import create_iban, is_valid

accounts = [('DE', '37040044', '532013000', 10), ('AT', '19043', '234573201', 11), ('NL', 'ABNA', '417164300', 10)]
for country, bank, account, length in accounts:
    made = create_iban(country, bank + account)
    right = create_iban(country, bank + account.zfill(length))
    rest = made.replace(' ', '')[4:]
    print(f'bank {bank}, account {account}: {made}, bank {rest[:len(bank)]}, account {rest[len(bank):]},',
          f'valid {is_valid(made)}; right {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

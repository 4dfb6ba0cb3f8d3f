#!/usr/bin/env bash
# benford-stats finds a wrong third digit in one of fourteen numbers: the third digit of 113 is 2, and of 201 it is 0.
#
# Packages: benford-stats 0.0.6, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: the number is scaled to 1.13 and multiplied by 100 again, which is 112.99999999999999, and cut
#   down to a whole number. Only the digit changes, down by one, never up.
# Expected: the digits that the number is written with.
# Why it matters here: the shares of the digits are what the package tests.
# Instead: take the digit from the text of the number, as it is done here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'benford-stats==0.0.6'
cat > expected.txt <<'EXPECTED'
113: third digit 2, as it is written 3
201: third digit 0, as it is written 1
1.16: third digit 5, as it is written 6
0.00557: third digit 7, as it is written 7
2320: third digit 1, as it is written 2
digit 1 of 100 to 999: 0 of 900 are wrong
digit 2 of 100 to 999: 0 of 900 are wrong
digit 3 of 100 to 999: 66 of 900 are wrong
digit 4 of 1000 to 9999: 154 of 9000 are wrong
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from benford.benford import nth_significant_digit

for number in (113, 201, 1.16, 0.00557, 2320):
    digits = f'{number:.10f}'.replace('.', '').lstrip('0')
    print(f'{number}: third digit {nth_significant_digit(number, 3)}, as it is written {digits[2]}')
for place, numbers in ((1, range(100, 1000)), (2, range(100, 1000)), (3, range(100, 1000)), (4, range(1000, 10_000))):
    wrong = [number for number in numbers if nth_significant_digit(number, place) != int(str(number)[place - 1])]
    print(f'digit {place} of {numbers[0]} to {numbers[-1]}: {len(wrong)} of {len(numbers)} are wrong')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

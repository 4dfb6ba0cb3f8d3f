#!/usr/bin/env bash
# The expected shares of benfords for two digits from the second place on add up to 5.
#
# Packages: benfords 1.0.2, numpy 2.2.6, pandas 2.3.3, matplotlib 3.10.7, seaborn 0.13.2.
# Behaviour: benfords(data, start_position, length) compares the digits of numbers with Benford's law.
#   For two digits from the second place on it lists 00 to 99 with expected shares that add up to
#   4.97, and from the third place to 8.66, since it puts a number of two digits into the formula for
#   one. It looks the digits up without a leading zero, so that 00 to 09 never occur in the data, and
#   12 % of the numbers are missing.
# Expected: shares that add up to 1, and 0.12 for 00 to 09, the share of a second digit of 0.
# Instead: test one digit at a time, or the first two.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'benfords==1.0.2' 'numpy==2.2.6' 'pandas==2.3.3' 'matplotlib==3.10.7' 'seaborn==0.13.2'
cat > expected.txt <<'EXPECTED'
1 from place 1: expected shares add up to 1.00, shares that were found to 1.00
2 from place 1: expected shares add up to 1.00, shares that were found to 1.00
1 from place 2: expected shares add up to 1.00, shares that were found to 1.00
2 from place 2: expected shares add up to 4.97, shares that were found to 0.88; 00 to 09: expected 1.000, found 0.000, right 0.120
2 from place 3: expected shares add up to 8.66, shares that were found to 0.90; 00 to 09: expected 1.000, found 0.000, right 0.102
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import log10

import numpy as np
from benfords import benfords

numbers = 10 ** ((np.arange(20000) + 0.5) / 20000)  # they follow the law exactly
for place, length in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2)):
    table = benfords(numbers, start_position=place, length=length)
    low = table[:10] if length == 2 and place > 1 else None
    zero = sum(log10(1 + 1 / (10 * k)) for k in range(10 ** (place - 2), 10 ** (place - 1))) if place > 1 else 0
    print(f'{length} from place {place}: expected shares add up to {table["Expected Value"].sum():.2f},',
          f'shares that were found to {table["Actual Value"].sum():.2f}' + ('' if low is None else
          f'; 00 to 09: expected {low["Expected Value"].sum():.3f}, found {low["Actual Value"].sum():.3f}, right {zero:.3f}'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

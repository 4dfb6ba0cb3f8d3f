#!/usr/bin/env bash
# The contribution that financecalculator2025 asks for grows with what was saved already: it adds
# the savings to the target.
#
# Packages: financecalculator2025 0.2.2, numpy 2.4.6, pandas 2.3.3.
# Behaviour: calculate_contribution documents positive principals for investments and negative
#   ones for loans. Its formula adds the principal with interest to the future value, as for a
#   loan, and takes the absolute value of the result. For a target of 20,000 somebody who has
#   10,000 is asked for 235 a month in place of 23, more than somebody who has nothing. With the
#   payments that it asks for, future_value of the same package gives 52,940 in place of 20,000.
# Expected: (future value - principal (1 + r)^n) r / ((1 + r)^n - 1), which is 0 where the savings
#   grow to the target by themselves.
# Instead: numpy_financial.pmt(rate / 12, n, -principal, future_value), whose sign is the other
#   one.
# Source: the future value of the package itself; Broverman, Mathematics of Investment and Credit,
#   chapter 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'financecalculator2025==0.2.2'
cat > expected.txt <<'EXPECTED'
from 0 to 20000 in ten years at 5 %: 128.80 a month, by the formula 128.80; reached with 128.80 by its own future_value 20000
from 5000 to 20000 in ten years at 5 %: 181.83 a month, by the formula 75.76; reached with 181.83 by its own future_value 36470
from 10000 to 20000 in ten years at 5 %: 234.86 a month, by the formula 22.73; reached with 234.86 by its own future_value 52940
from -10000 to 0 in ten years at 5 %: 106.07 a month, by the formula 106.07; reached with 106.07 by its own future_value 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import importlib
import pandas as pd

package = importlib.import_module('financecalculator2025')
contribution = importlib.import_module('financecalculator2025.contribution').calculate_contribution
future = importlib.import_module('financecalculator2025.future_value').future_value

rate, months = 0.05 / 12, 120
for principal, target in ((0, 20000), (5000, 20000), (10000, 20000), (-10000, 0)):
    seen = contribution(principal, target, 5, months)
    growth = (1 + rate) ** months
    right = (target - principal * growth) * rate / (growth - 1)
    reached = float(future(principal, 5, months, contribution=seen)['Future Value'].iloc[0])
    print(f'from {principal} to {target} in ten years at 5 %: {seen:.2f} a month, by the formula {right:.2f};',
          f'reached with {seen:.2f} by its own future_value {reached + 0.0:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

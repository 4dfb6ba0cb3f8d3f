#!/usr/bin/env bash
# stroke-lifetime drops the last year of a survival of whole years: 4.99 years of full health are 4.99 QALYs and five are 4.
#
# Packages: stroke-lifetime 3.0.2, numpy 2.2.6.
# Behaviour: calculate_qaly scales the last year with the part behind the decimal point, years % int(years). For a whole
#   number this is 0 and should be 1.
# Expected: 5 quality-adjusted years for five years with a utility of 1 and without a discount.
# Why it matters here: a trial with a fixed time of follow-up gives whole years. Two years are worth one.
# Instead: add 1e-9 to the years.
# Source: the definition: years times utility.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'stroke-lifetime==3.0.2'
cat > expected.txt <<'EXPECTED'
0.5 years of full health, no discount: 0.50 QALYs
1.0 years of full health, no discount: 1.00 QALYs
1.99 years of full health, no discount: 1.99 QALYs
2.0 years of full health, no discount: 1.00 QALYs
2.01 years of full health, no discount: 2.01 QALYs
4.99 years of full health, no discount: 4.99 QALYs
5.0 years of full health, no discount: 4.00 QALYs
5.01 years of full health, no discount: 5.01 QALYs
10.0 years of full health, no discount: 9.00 QALYs
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from stroke_lifetime.models import calculate_qaly

for years in (0.5, 1.0, 1.99, 2.0, 2.01, 4.99, 5.0, 5.01, 10.0):
    seen = calculate_qaly(1.0, years, 70, 0, 70, 0, 0, 0, dfq=0.0)[0]
    print(f'{years} years of full health, no discount: {seen:.2f} QALYs')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

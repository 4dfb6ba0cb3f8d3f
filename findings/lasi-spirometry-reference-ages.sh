#!/usr/bin/env bash
# lasi-spirometry-reference says that it interpolates ages, and raises a TypeError for each that is not whole.
#
# Packages: lasi-spirometry-reference 0.1.0.
# Behaviour: for an age between two of the table it takes the largest row below it and the smallest
#   above it, and rows are dictionaries, which have no order. 60 works, 60.5 does not, and the error
#   speaks of dictionaries and not of the age.
# Expected: a value between the ones at 60 and 61, as documented.
# Why it matters here: ages computed from dates of birth are never whole.
# Instead: interpolate the median and the lower limit between the two whole ages.
# Source: the documentation of its module and of predict.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lasi-spirometry-reference==0.1.0'
cat > expected.txt <<'EXPECTED'
60 years: median 2.188 L, lower limit 1.374 L
60.5 years: '>' not supported between instances of 'dict' and 'dict'
61 years: median 2.165 L, lower limit 1.356 L
by hand at 60.5 years: median 2.177 L
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lasi_spirometry_reference import predict

for age in (60, 60.5, 61):
    try:
        seen = predict('male', age, 165, 'fev1')
        print(f'{age} years: median {seen.median:.3f} L, lower limit {seen.lln:.3f} L')
    except TypeError as error:
        print(f'{age} years:', error)
below, above = predict('male', 60, 165, 'fev1'), predict('male', 61, 165, 'fev1')
print(f'by hand at 60.5 years: median {(below.median + above.median) / 2:.3f} L')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

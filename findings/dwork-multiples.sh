#!/usr/bin/env bash
# dwork multiplies the noise of a whole number by the sensitivity, so the remainder of a private sum
# is exact.
#
# Packages: dwork 0.0.13, pandas 3.1.1, numpy 2.4.6.
# Behaviour: for integer columns the geometric mechanism draws a whole number for sensitivity 1, and
#   dwork adds it times the sensitivity. The sum of ages between 0 and 100 is released as the true
#   sum plus a multiple of 100. If one person is a year older, every release has another last digit:
#   the two tables have no release in common, whatever ε is. Columns of decimals have Laplace noise
#   and are not concerned.
# Expected: noise of all whole numbers, with the parameter ε divided by the sensitivity; each
#   release is then at most exp(ε) times as likely in one table as in the other.
# Instead: declare the column as Float, or use the geometric mechanism of opendp.
# Source: Ghosh, Roughgarden and Sundararajan, Universally utility-maximizing privacy mechanisms
#   (2009).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dwork==0.0.13'
cat > expected.txt <<'EXPECTED'
ages 30, 50, 60: 1000 releases, more than 10 different ones, remainders by 100: [40]
ages 30, 50, 61: 1000 releases, more than 10 different ones, remainders by 100: [41]
releases that both tables can give: 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from dwork.dataschema import DataSchema
from dwork.dataset.pandas import PandasDataset
from dwork.language.types import Integer


class Patients(DataSchema):
    age = Integer(min=0, max=100)


digits = {}
for last in (60, 61):
    table = PandasDataset(Patients, pd.DataFrame({'age': [30, 50, last]}))
    total = table['age'].sum()
    releases = [total.dp(0.1) for _ in range(1000)]
    digits[last] = {int(release) % 100 for release in releases}
    print(f'ages 30, 50, {last}: 1000 releases,', 'more' if len(set(releases)) > 10 else 'less',
          f'than 10 different ones, remainders by 100: {sorted(digits[last])}')
print('releases that both tables can give:', len(digits[60] & digits[61]))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

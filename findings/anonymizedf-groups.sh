#!/usr/bin/env bash
# anonymizedf draws the fake weight of an adult from the weights of children where a child weighs as
# much.
#
# Packages: anonymizedf 1.0.1, faker 40.63.0, pandas 2.2.3, numpy 1.26.4.
# Behaviour: fake_whole_numbers and fake_decimal_numbers with group_by draw a number for each value
#   of a group between the least and the largest one of the group, and collect them in one
#   dictionary by value. A value of two groups has the number of the group that comes last in the
#   alphabet, for both. Within a group, equal values have equal fake numbers, so their counts stay.
# Expected: each group's fake numbers within its range, which is what group_by is for.
# Why it matters here: groups leak into each other, and a model sees adults of 12 kg.
# Instead: a call for each group's table, and pandas.concat.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'Faker==40.63.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'anonymizedf==1.0.1'
cat > expected.txt <<'EXPECTED'
adults, 45 to 95 kg: fake weights 15 to 94 kg, 113 of 500 outside
children, 12 to 60 kg: fake weights 12 to 60 kg, 0 of 500 outside
values of both wards with one fake weight each: 16 of 16
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from anonymizedf.anonymizedf import anonymize
from faker import Faker

Faker.seed(0)
random = np.random.default_rng(0)
people = pd.DataFrame({'ward': ['children'] * 500 + ['adults'] * 500,
                       'weight': np.r_[random.integers(12, 61, 500), random.integers(45, 96, 500)]})
with contextlib.redirect_stdout(io.StringIO()):
    made = anonymize(people.copy()).fake_whole_numbers('weight', group_by='ward')
for ward, rows in made.groupby('ward'):
    low, high = rows['weight'].min(), rows['weight'].max()
    outside = ~rows['Fake_weight'].between(low, high)
    print(f"{ward}, {low} to {high} kg: fake weights {rows['Fake_weight'].min()} to {rows['Fake_weight'].max()} kg, "
          f'{outside.sum()} of {len(rows)} outside')
shared = made[made['weight'].between(45, 60)].groupby('weight')
same = (shared['Fake_weight'].nunique() == 1).sum()
print(f'values of both wards with one fake weight each: {same} of {len(shared)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

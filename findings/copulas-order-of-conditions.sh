#!/usr/bin/env bash
# The conditional samples of copulas exchange the conditions where these are not in the order of the
# columns: people of 190 cm and 50 years weigh 70 kg in place of 88.
#
# Packages: copulas 0.14.1, pandas 2.3.3, numpy 2.4.6, scipy 1.17.1.
# Behaviour: GaussianMultivariate.sample(conditions={'age': 50, 'height': 190}) converts the values to
#   normal scores in the order of the fitted columns, height first, and labels the scores in the order
#   of the dictionary, age first. The age gets the score of the height and the height the score of the
#   age. The columns with the conditions show what was asked for, so the table looks right.
# Expected: the same samples for both orders, since a condition has a name.
# Why it matters here: conditional samples fill missing values and are compared with samples of a
#   private synthesizer.
# Instead: {name: conditions[name] for name in model.columns if name in conditions}.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'copulas==0.14.1' 'pandas==2.3.3' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
table, 188 to 192 cm and 45 to 55 years: weight 88, pressure 120
{'height': 190, 'age': 50}: height 190, age 50, weight 88, pressure 120
{'age': 50, 'height': 190}: height 190, age 50, weight 70, pressure 144
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from copulas.multivariate import GaussianMultivariate
from copulas.univariate import GaussianUnivariate

random = np.random.default_rng(0)
height = random.normal(170, 10, 5000)
age = random.normal(50, 15, 5000)
people = pd.DataFrame({
    'height': height,
    'age': age,
    'weight': 70 + 0.9 * (height - 170) + random.normal(0, 5, 5000),
    'pressure': 120 + 0.8 * (age - 50) + random.normal(0, 5, 5000),
})
model = GaussianMultivariate(distribution=GaussianUnivariate, random_state=0)
model.fit(people)
near = people[people.height.between(188, 192) & people.age.between(45, 55)]
print(f'table, 188 to 192 cm and 45 to 55 years: weight {near.weight.mean():.0f}, '
      f'pressure {near.pressure.mean():.0f}')
for conditions in ({'height': 190, 'age': 50}, {'age': 50, 'height': 190}):
    sampled = model.sample(5000, conditions=conditions).mean()
    print(f'{conditions}: height {sampled.height:.0f}, age {sampled.age:.0f}, '
          f'weight {sampled.weight:.0f}, pressure {sampled.pressure:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

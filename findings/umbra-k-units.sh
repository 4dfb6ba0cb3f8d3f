#!/usr/bin/env bash
# umbra-k divides people by the column with the largest numbers: weights in grams take all divisions
# and no age is left, where weights in kilograms leave the ages.
#
# Packages: umbra-k 0.1.0, pandas 2.3.3, numpy 2.4.6, scikit-learn 1.9.0.
# Behaviour: the column to divide by is the one with the largest difference of its values in the
#   group, and for texts with the most values; neither is divided by what it is in the whole table.
#   A column of money, of identifiers or of dates as numbers takes all divisions.
# Expected: the relative or normalised span that the documentation names in three places, and the
#   algorithm has. A change of units then changes nothing.
# Why it matters here: the columns with small numbers, such as sex or age, become one range for all.
# Instead: pass columns that were divided by their range, and map the ranges back.
# Source: LeFevre, DeWitt and Ramakrishnan (2006), section 4: the widest (normalised) range of values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'umbra-k==0.1.0' 'pandas==2.3.3' 'numpy==2.4.6' 'scikit-learn==1.9.0'
cat > expected.txt <<'EXPECTED'
relative span, normalized span in the documentation: True True
weight in kg: mean range of age 8 years, of weight 6.7 kg
weight in g: mean range of age 61 years, of weight 1.1 kg
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from umbra_k import MondrianAnonymizer, anonymizer

documents = anonymizer.__doc__ + MondrianAnonymizer._partition.__doc__
print('relative span, normalized span in the documentation:',
      'widest relative span' in documents, 'widest normalized span' in documents)
random = np.random.default_rng(0)
age, weight = random.integers(20, 90, 1000), random.normal(75, 12, 1000).round(1)


def measure_width(ranges):
    ends = ranges.str.split('-', expand=True).ffill(axis=1).astype(float)
    return (ends[1] - ends[0]).mean()


for unit, factor in (('kg', 1), ('g', 1000)):
    people = pd.DataFrame({'age': age, 'weight': (weight * factor).round(1)})
    result = MondrianAnonymizer(k=10, quasi_id=['age', 'weight']).fit_transform(people)
    print(f'weight in {unit}: mean range of age {measure_width(result.age):.0f} years,',
          f'of weight {measure_width(result.weight) / factor:.1f} kg')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

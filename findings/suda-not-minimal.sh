#!/usr/bin/env bash
# suda counts each combination that contains a unique value as another unique: one rare value makes as many
# minimal uniques as there are columns, and more with a larger search.
#
# Packages: suda 0.2.2, pandas 2.2.3, numpy 1.26.4.
# Behaviour: fM is documented as the number of minimal sample uniques of a row, and suda as the sum of their
#   scores. All combinations that occur once are counted, whether a part of them occurs once already or not.
#   Somebody with a unique disease and nothing else that is rare has one for the disease, one for each pair
#   with it, and so on.
# Expected: combinations that are unique and have no unique part: a person whose disease is unique has 1 of
#   them, whatever max_msu is.
# Why it matters here: the order of the rows by risk, for which the algorithm is used, is another one.
# Instead: count them by hand, as below.
# Source: Elliot, Manning and Ford (2002), "A computational algorithm for handling the special uniques
#   problem", International Journal of Uncertainty, Fuzziness and Knowledge-Based Systems 10(5).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'suda==0.2.2' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
up to 1 columns, the only one with the disease: suda 1 with a score of 24, by hand 1 with 24
up to 1 columns, the only smoker in a village: suda 0 with a score of 0, by hand 0 with 0
up to 2 columns, the only one with the disease: suda 5 with a score of 48, by hand 1 with 24
up to 2 columns, the only smoker in a village: suda 2 with a score of 12, by hand 2 with 12
up to 3 columns, the only one with the disease: suda 11 with a score of 60, by hand 1 with 24
up to 3 columns, the only smoker in a village: suda 7 with a score of 22, by hand 2 with 12
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import combinations
from math import factorial

import pandas as pd
from suda import suda

ages, regions, sexes = ['young', 'old'], ['town', 'village'], ['f', 'm']
rows = [(age, region, sex, 'flu', 'no') for age in ages for region in regions for sex in sexes] * 3
rows += [('young', 'town', 'f', 'plague', 'no')]  # unique by the disease
rows += [('old', 'town', 'f', 'flu', 'yes')] * 2 + [('old', 'village', 'm', 'flu', 'yes')]  # by region and smoking
people = pd.DataFrame(rows, columns=['age', 'region', 'sex', 'disease', 'smokes'])


def minimal_uniques(row, largest):
    """Return the columns of each unique combination without a unique part."""
    found = []
    for size in range(1, largest + 1):
        for columns in combinations(people.columns, size):
            alike = (people[list(columns)] == people.loc[row, list(columns)]).all(axis=1).sum()
            if alike == 1 and not any(set(part) <= set(columns) for part in found):
                found.append(columns)
    return found


for largest in (1, 2, 3):
    scores = suda(people.copy(), max_msu=largest)
    for row, name in ((24, 'the only one with the disease'), (27, 'the only smoker in a village')):
        right = minimal_uniques(row, largest)
        score = sum(factorial(people.shape[1] - len(columns)) for columns in right)
        print(f"up to {largest} columns, {name}: suda {scores['fM'][row]} with a score of {scores['suda'][row]}, "
              f'by hand {len(right)} with {score}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

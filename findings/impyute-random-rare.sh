#!/usr/bin/env bash
# The random value that impyute fills in is drawn from the different values of a column and not from its people: a
# disease of 1 % is given to half of those for whom it is missing.
#
# Packages: impyute 0.0.8, numpy 1.23.5, scipy 1.10.1, scikit-learn 1.2.2.
# Behaviour: random documents a randomly selected value from the same column. It takes each different value once
#   before it draws, so that the rarest value is as likely as the most frequent one, and outliers as ordinary
#   values.
# Expected: the shares of the column, as with a random person.
# Instead: draw from the values that are not missing, with numpy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5' 'scipy==1.10.1' 'scikit-learn==1.2.2' 'impyute==0.0.8'
cat > expected.txt <<'EXPECTED'
with the disease: 1.0% of the people, 51.0% of the filled values
50 visits: 0.1% of the people, 26.2% of the filled values
mean number of visits: 0.69 of the people, 13.86 of the filled values
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from impyute.imputation.cs import random

np.random.seed(0)
disease = np.repeat([0.0, 1.0], [7920, 80])
visits = np.repeat([0.0, 1.0, 2.0, 50.0], [4000, 3000, 990, 10])
data = np.column_stack([disease, visits])
gaps = np.full((2000, 2), np.nan)
filled = random(np.vstack([data, gaps]))[8000:]
print(f'with the disease: {disease.mean():.1%} of the people, {filled[:, 0].mean():.1%} of the filled values')
print(f'50 visits: {(visits == 50).mean():.1%} of the people, {(filled[:, 1] == 50).mean():.1%} of the filled values')
print(f'mean number of visits: {visits.mean():.2f} of the people, {filled[:, 1].mean():.2f} of the filled values')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

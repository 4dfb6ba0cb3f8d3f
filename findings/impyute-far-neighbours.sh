#!/usr/bin/env bash
# The nearest neighbours of impyute count the more the farther away they are.
#
# Packages: impyute 0.0.8, numpy 1.23.5, scipy 1.10.1, scikit-learn 1.2.2.
# Behaviour: fast_knn fills a missing value with the mean of its three nearest neighbours, weighted by their
#   distance and not by its inverse: a neighbour with the same values has a weight of 0 and the farthest one the
#   largest. It documents a weighted average of the neighbours.
# Expected: weights that fall with the distance, or equal ones.
# Why it matters here: the fewer similar people there are, the farther off is the value that is filled in.
# Instead: sklearn.impute.KNNImputer(weights='distance').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5' 'scipy==1.10.1' 'scikit-learn==1.2.2' 'impyute==0.0.8'
cat > expected.txt <<'EXPECTED'
distances of the three nearest [ 1.8  2.8 34.3], their weights [ 70.  71. 100.]
impyute: 96.5
by distance: 96.5
by inverse distance: 71.3
scikit-learn: 70.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from impyute.imputation.cs import fast_knn
from sklearn.impute import KNNImputer

# age, height and weight; the weight of the first person is missing
people = np.array([[40, 170, np.nan], [40, 170, 70], [40.1, 170, 71], [48, 160, 100], [30, 195, 40], [75, 150, 60]], float)
complete = people.copy()
complete[0, 2] = 68.2                 # the mean, with which fast_knn looks for neighbours
distance = np.sqrt(((complete[1:] - complete[0]) ** 2).sum(axis=1))
near = np.argsort(distance)[:3]
inverse = 1 / distance[near]
print(f'distances of the three nearest {np.round(distance[near], 1)}, their weights {people[1:][near, 2]}')
print(f'impyute: {fast_knn(people, k=3)[0, 2]:.1f}')
print(f'by distance: {(distance[near] * people[1:][near, 2]).sum() / distance[near].sum():.1f}')
print(f'by inverse distance: {(inverse * people[1:][near, 2]).sum() / inverse.sum():.1f}')
print(f'scikit-learn: {KNNImputer(n_neighbors=3, weights="distance").fit_transform(people)[0, 2]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# aif360 counts each person as their own nearest neighbour, so decisions by chance seem consistent.
#
# Packages: aif360 0.6.1, scikit-learn 1.9.1, pandas 2.3.3, numpy 1.26.4.
# Behaviour: consistency compares a person's decision with the mean decision of the n nearest
#   people. The nearest one is the person, whose own decision is a fifth of the mean with the
#   default of five. With one neighbour all decisions are fully consistent. The protected attribute
#   is among the features that say who is near.
# Expected: the similar people of the paper, who are others: 0.5 for decisions by chance.
# Why it matters here: the score has a floor that depends on n, and noise of a private model, which
#   makes decisions of similar people differ, is measured as less than it is.
# Instead: NearestNeighbors(...).kneighbors() without an argument, which leaves each row itself out.
# Source: Zemel and others, Learning Fair Representations, ICML 2013.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==1.26.4' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'aif360==0.6.1'
cat > expected.txt <<'EXPECTED'
decisions by chance, neighbours 1: aif360 1.00, neighbours other than the person 0.49
decisions by chance, neighbours 5: aif360 0.59, neighbours other than the person 0.49
decisions by age, neighbours 1: aif360 1.00, neighbours other than the person 0.99
decisions by age, neighbours 5: aif360 0.98, neighbours other than the person 0.98
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from aif360.datasets import BinaryLabelDataset
from aif360.metrics import BinaryLabelDatasetMetric
from sklearn.neighbors import NearestNeighbors

random = np.random.default_rng(0)
people = pd.DataFrame({'sex': random.integers(0, 2, 1000), 'age': random.normal(50, 15, 1000),
                       'weight': random.normal(75, 12, 1000)})
decisions = {'by chance': random.integers(0, 2, 1000), 'by age': (people['age'] > 50).astype(int)}
for name, decision in decisions.items():
    table = people.assign(label=decision)
    data = BinaryLabelDataset(df=table.astype(float), label_names=['label'], protected_attribute_names=['sex'])
    metric = BinaryLabelDatasetMetric(data, [{'sex': 0}], [{'sex': 1}])
    labels = data.labels.ravel()
    for count in (1, 5):
        near = NearestNeighbors(n_neighbors=count).fit(data.features).kneighbors(return_distance=False)
        others = 1 - np.abs(labels - labels[near].mean(axis=1)).mean()
        print(f'decisions {name}, neighbours {count}: aif360 {float(np.ravel(metric.consistency(count))[0]):.2f}, '
              f'neighbours other than the person {others:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

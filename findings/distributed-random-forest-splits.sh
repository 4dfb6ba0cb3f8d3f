#!/usr/bin/env bash
# The private forest of distributed-random-forest splits like one without privacy: half of its trees show whether a
# person with a rare income is in the table, whatever ε.
#
# Packages: distributed-random-forest 0.4.0, scikit-learn 1.9.1, numpy 2.4.6, pandas 3.1.1, joblib 1.5.3.
# Behaviour: DPRandomForest is described with the Laplace mechanism for the leaves and the exponential mechanism
#   for the splits. It grows scikit-learn's trees on the records and adds noise to their leaves only. A
#   threshold is the middle between two values of the table, such as 2550 between 100 and 5000, and depends on
#   ε not at all. No ε bounds that: the neighbouring table has no such threshold in any tree.
# Expected: splits that are drawn with the exponential mechanism, or from bounds that are given.
# Why it matters here: forests of clients are merged and handed out, thresholds included.
# Instead: random splits between given bounds with noise on the counts, as diffprivlib's forest has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.9.1' 'numpy==2.4.6' 'pandas==3.1.1' 'joblib==1.5.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'distributed-random-forest==0.4.0'
cat > expected.txt <<'EXPECTED'
person in the table, epsilon 0.001: trees with an income above 1000 as a threshold 9 of 20; thresholds as for epsilon 0.001: True
person in the table, epsilon 1: trees with an income above 1000 as a threshold 9 of 20; thresholds as for epsilon 0.001: True
person in the table, epsilon 1000: trees with an income above 1000 as a threshold 9 of 20; thresholds as for epsilon 0.001: True
person not in the table, epsilon 0.001: trees with an income above 1000 as a threshold 0 of 20; thresholds as for epsilon 0.001: True
person not in the table, epsilon 1: trees with an income above 1000 as a threshold 0 of 20; thresholds as for epsilon 0.001: True
person not in the table, epsilon 1000: trees with an income above 1000 as a threshold 0 of 20; thresholds as for epsilon 0.001: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from distributed_random_forest.models.dp_rf import DPRandomForest

random = np.random.default_rng(0)
people = np.column_stack([random.uniform(20, 100, 1000).round(1), random.integers(20, 80, 1000)])
defaults = (people[:, 0] + random.normal(0, 20, 1000) > 60).astype(int)
rare = np.array([5000.0, 50.0])  # the income of the person and the age


def collect(epsilon, present):
    table = np.vstack([people, rare]) if present else people
    labels = np.append(defaults, 0) if present else defaults
    forest = DPRandomForest(n_estimators=20, max_depth=6, epsilon=epsilon, random_state=0, n_jobs=1)
    trees = [tree.tree_ for tree in forest.fit(table, labels).get_trees()]
    return [tree.threshold[tree.feature == 0] for tree in trees]


for present in (True, False):
    first = collect(0.001, present)
    for epsilon in (0.001, 1, 1000):
        thresholds = collect(epsilon, present)
        shown = sum(bool((values > 1000).any()) for values in thresholds)
        same = all(np.array_equal(*pair) for pair in zip(first, thresholds))
        print(f'person {"in" if present else "not in"} the table, epsilon {epsilon}: trees with an income above 1000 as a '
              f'threshold {shown} of 20; thresholds as for epsilon 0.001: {same}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

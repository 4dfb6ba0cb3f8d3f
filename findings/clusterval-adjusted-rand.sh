#!/usr/bin/env bash
# The adjusted Rand index of clusterval is 1 for two clusterings that have nothing in common.
#
# Packages: clusterval 1.0.5, fastcluster 1.3.0, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3, scikit-learn
#   1.9.1, matplotlib 3.11.2.
# Behaviour: The number of agreements that chance explains ends in "/ 2*(N - 1)", which multiplies by N -
#   1 where the formula of Hubert and Arabie divides by it. It is then far larger than the number of
#   pairs, and the index is 1 whatever the clusterings are; for few people it is above 1, the largest
#   value there is. By default it is one of the indices that choose the number of clusters.
# Expected: 0 for two unrelated clusterings, as in scikit-learn.
# Instead: sklearn.metrics.adjusted_rand_score.
# Source: Hubert and Arabie, Comparing partitions, Journal of Classification 2 (1985).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'fastcluster==1.3.0'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'clusterval==1.0.5'
cat > expected.txt <<'EXPECTED'
30 people, two clusterings by chance: clusterval 1.0015, scikit-learn 0.0051
300 people, two clusterings by chance: clusterval 1.0000, scikit-learn -0.0018
3000 people, two clusterings by chance: clusterval 1.0000, scikit-learn 0.0001
3000 people, half of them in the same cluster: clusterval 1.0000, scikit-learn 0.2490
3000 people, the same clustering twice: clusterval 1.0000, scikit-learn 1.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from clusterval.external import calculate_external
from sklearn.metrics import adjusted_rand_score

random = np.random.default_rng(0)


def show(name, first, second):
    parts = [[list(np.flatnonzero(labels == k)) for k in range(3)] for labels in (first, second)]
    index = calculate_external(*parts, indices=['AR'])['AR']
    print(f'{name}: clusterval {index:.4f}, scikit-learn {adjusted_rand_score(first, second):.4f}')


for people in (30, 300, 3000):
    first, second = random.integers(0, 3, size=(2, people))
    show(f'{people} people, two clusterings by chance', first, second)
half = np.where(np.arange(3000) % 2, first, second)
show('3000 people, half of them in the same cluster', first, half)
show('3000 people, the same clustering twice', first, first)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

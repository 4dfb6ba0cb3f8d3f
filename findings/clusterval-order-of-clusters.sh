#!/usr/bin/env bash
# The Davies-Bouldin and SD indices of clusterval depend on the order in which the clusters are listed.
#
# Packages: clusterval 1.0.5, fastcluster 1.3.0, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3, scikit-learn
#   1.9.1, matplotlib 3.11.2.
# Behaviour: Both indices take for each cluster the largest similarity, or the sum of distances, to the
#   other clusters. The loop begins behind the cluster itself, so that a cluster is compared with the
#   later ones alone, and the last one with none: it adds 0 to a sum that is divided by all clusters. The
#   number of clusters with the smallest index is taken as the best.
# Expected: one value for one clustering: the Davies-Bouldin index of scikit-learn, 0.185 here.
# Instead: sklearn.metrics.davies_bouldin_score.
# Source: Davies and Bouldin, A cluster separation measure, IEEE PAMI 1 (1979): the maximum over all other
#   clusters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'fastcluster==1.3.0'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'clusterval==1.0.5'
cat > expected.txt <<'EXPECTED'
scikit-learn: 0.185
clusters in the order (0, 1, 2): Davies-Bouldin 0.107, SD 0.251
clusters in the order (0, 2, 1): Davies-Bouldin 0.107, SD 0.251
clusters in the order (1, 0, 2): Davies-Bouldin 0.121, SD 0.267
clusters in the order (1, 2, 0): Davies-Bouldin 0.121, SD 0.267
clusters in the order (2, 0, 1): Davies-Bouldin 0.121, SD 0.255
clusters in the order (2, 1, 0): Davies-Bouldin 0.121, SD 0.255
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import permutations

import numpy as np
from clusterval.internal import calculate_internal
from sklearn.metrics import davies_bouldin_score

points = np.array([[0, 0], [2, 0], [0, 1], [10, 0], [11, 0], [10, 1], [4, 8], [4, 9], [5, 8]], dtype=float)
labels = np.repeat([0, 1, 2], 3)
print(f'scikit-learn: {davies_bouldin_score(points, labels):.3f}')
for order in permutations(range(3)):
    clustering = {3: {'clusters': [list(np.flatnonzero(labels == k)) for k in order],
                      'centroids': [list(points[labels == k].mean(axis=0)) for k in order]}}
    result = calculate_internal(clustering, data=points.tolist(), indices=['DB', 'SD'])
    print(f'clusters in the order {order}: Davies-Bouldin {result["DB"][3]:.3f}, SD {result["SD"][3]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

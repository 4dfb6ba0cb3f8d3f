#!/usr/bin/env bash
# dclustval merges two clusters or keeps them by which of them has the number 0.
#
# Packages: dclustval 0.1.0, scipy 1.17.1, numpy 2.4.6, networkx 3.6.1, seaborn 0.13.2, statsmodels
#   0.15.0, scikit-learn 1.9.1, pandas 2.3.3, matplotlib 3.11.2.
# Behaviour: do_cluster_validation asks of both clusters whether the distances within them are smaller
#   than the ones between them, and keeps the larger of two p-values. The ranks of the second cluster are
#   computed, and the test is given those of the first one again, beside distances that were ranked with
#   the second. Each pair is tested in both orders and the last result, for the cluster with the higher
#   number, is kept.
# Expected: the same clusters for the same people, whatever their numbers.
# Instead: scipy.stats.mannwhitneyu for the distances within each of the clusters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'seaborn==0.13.2' 'statsmodels==0.15.0' \
  'networkx==3.6.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'dclustval==0.1.0'
cat > expected.txt <<'EXPECTED'
same centre, standard deviations 1 and 1.0: two clusters in 1 of 20 samples, with the numbers exchanged in 0
same centre, standard deviations 1 and 1.6: two clusters in 0 of 20 samples, with the numbers exchanged in 18
same centre, standard deviations 1 and 3.0: two clusters in 0 of 20 samples, with the numbers exchanged in 20
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from dclustval import do_cluster_validation
from sklearn.metrics.pairwise import euclidean_distances


def kept(labels, parts):
    with contextlib.redirect_stdout(io.StringIO()):
        return len(set(do_cluster_validation(*map(euclidean_distances, parts), labels)[2])) == 2


labels = np.repeat([0, 1], 30)
for spread in (1.0, 1.6, 3.0):
    counts = [0, 0]
    for seed in range(20):
        random = np.random.default_rng(seed)
        parts = [np.vstack([random.normal(0, 1, (30, 2)), random.normal(0, spread, (30, 2))]) for _ in range(2)]
        for which, numbers in enumerate((labels, 1 - labels)):
            counts[which] += kept(numbers, parts)
    print(f'same centre, standard deviations 1 and {spread}: two clusters in {counts[0]} of 20 samples, '
          f'with the numbers exchanged in {counts[1]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

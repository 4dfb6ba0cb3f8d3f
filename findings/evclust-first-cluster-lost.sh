#!/usr/bin/env bash
# The credal c-means of evclust overwrites the distances to the first cluster by a constant.
#
# Packages: evclust 0.2.1, scipy 1.17.1, scikit-learn 1.9.1, pandas 3.1.1, numpy 2.4.6, matplotlib
#   3.11.2, seaborn 0.13.2.
# Behaviour: the table of distances has no column for the empty set. delta^2, the distance to the
#   empty set, is put into its first column nevertheless, which is the one of the first cluster.
#   That cluster attracts nobody by being near, its people go to the union of both clusters, its
#   centre moves away, and nobody is an outlier, since the empty set has the mass that is left, 0.
# Expected: the same masses for two clusters that are alike, and a mass of the empty set for people
#   who are far from both.
# Why it matters here: people at the centre of a cluster are said to be ambiguous.
# Instead: ecm of the same package.
# Source: Liu et al., Credal c-means Clustering Method Based on Belief Functions, Knowledge-Based
#   Systems 2015.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scipy==1.17.1' 'scikit-learn==1.9.1' 'pandas==3.1.1' 'numpy==2.4.6' 'matplotlib==3.11.2' 'seaborn==0.13.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'evclust==0.2.1'
cat > expected.txt <<'EXPECTED'
ccm: mean mass of the own cluster 0.19 and 0.85, of both together 0.21; mass of the empty set for the person far away 0.00
ecm: mean mass of the own cluster 0.98 and 0.98, of both together 0.01; mass of the empty set for the person far away 0.93
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from evclust.ccm import ccm
from evclust.ecm import ecm

random = np.random.default_rng(0)
half = random.normal((3, 3), 0.5, (50, 2))
people = np.concatenate([half, -half, [[40.0, -40.0]]])  # two clusters that mirror each other, and one person far away
for name, cluster in (('ccm', ccm), ('ecm', ecm)):
    np.random.seed(0)
    result = cluster(people, 2, delta=10, disp=False)
    first = int(np.argmax(result['g'].sum(axis=1)))  # the cluster at (3, 3)
    mass = result['mass'][:, [0, 1 + first, 2 - first, 3]]
    own = (mass[:50, 1].mean(), mass[50:100, 2].mean())
    print(f'{name}: mean mass of the own cluster {min(own):.2f} and {max(own):.2f}, of both together {mass[:100, 3].mean():.2f}; '
          f'mass of the empty set for the person far away {abs(mass[100, 0]):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

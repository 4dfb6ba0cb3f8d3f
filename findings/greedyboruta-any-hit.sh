#!/usr/bin/env bash
# greedyboruta confirms features in every table without any relation to the outcome.
#
# Packages: greedyboruta 1.0.0, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6, pandas 2.3.3.
# Behaviour: A feature is confirmed where it is better than the best shuffled feature in one of K rounds
#   or more, and K rises with the number of features. In each round one of the real features is the best
#   of all with a probability of a half where nothing is related, so that after nine rounds some feature
#   is confirmed in 99.8 % of the tables. The Bonferroni correction, which "controls family-wise error
#   rate across all features", makes K larger and this probability larger too.
# Expected: a feature is confirmed in at most 5 % of such tables with alpha=0.05.
# Instead: the package boruta, which tests the number of hits of each feature.
# Source: Kursa and Rudnicki, Feature selection with the Boruta package, Journal of Statistical Software
#   36 (2010).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps \
  'greedyboruta==1.0.0'
cat > expected.txt <<'EXPECTED'
without Bonferroni correction, 5 rounds: features confirmed in 10 of 10 tables, 4.3 of 20 on average
with Bonferroni correction, 9 rounds: features confirmed in 10 of 10 tables, 5.1 of 20 on average
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from greedyboruta import GreedyBorutaPy
from sklearn.ensemble import RandomForestClassifier

for corrected in (False, True):
    confirmed, rounds = [], 0
    for seed in range(10):
        random = np.random.default_rng(seed)
        values, outcome = random.normal(size=(60, 20)), random.integers(0, 2, 60)
        forest = RandomForestClassifier(max_depth=3, n_jobs=1)
        selector = GreedyBorutaPy(forest, n_estimators=10, alpha=0.05, bonferroni=corrected, random_state=seed)
        confirmed.append(int(selector.fit(values, outcome).support_.sum()))
        rounds = selector.max_iter
    print(f"{'with' if corrected else 'without'} Bonferroni correction, {rounds} rounds: features confirmed in "
          f'{sum(count > 0 for count in confirmed)} of 10 tables, {np.mean(confirmed):.1f} of 20 on average')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

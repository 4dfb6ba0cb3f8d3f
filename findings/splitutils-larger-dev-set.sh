#!/usr/bin/env bash
# splitutils picks the split with the largest dev set: it compares its share of all rows with a size that it has
# changed to a share of the rest, so that it is 19 % in place of the 10 % asked for.
#
# Packages: splitutils 0.4.3, scikit-learn 1.9.1, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: optimize_traindevtest_split divides dev_size by 1 - test_size, to split what the test set leaves. The
#   score of a split then takes the difference of that number and len(dev) / N, the share of all rows, as "the
#   difference between dev and test sizes of X and set(split_on)". Of the splits that it tries, it prefers those
#   whose dev set is too large; the report beside it says 0.1.
# Expected: a share near dev_size, as for the test set.
# Why it matters here: people with many rows end in the dev set, and the training set is smaller.
# Instead: weight={'size_diff': 0}, which leaves the sizes out of the score, or two calls of
#   optimize_traintest_split.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'splitutils==0.4.3' 'scikit-learn==1.9.1' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
dev_size 0.1, test_size 0.1, weight None: dev set 11% of the rows, test set 10%
dev_size 0.1, test_size 0.1, weight {'size_diff': 0}: dev set 11% of the rows, test set 9%
dev_size 0.1, test_size 0.5, weight None: dev set 19% of the rows, test set 49%
dev_size 0.1, test_size 0.5, weight {'size_diff': 0}: dev set 11% of the rows, test set 50%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from splitutils import optimize_traindevtest_split

for test_size in (0.1, 0.5):
    for weight in (None, {'size_diff': 0}):
        shares = []
        for seed in range(10):
            random = np.random.default_rng(seed)
            people = np.repeat(np.arange(60), random.geometric(0.05, 60))
            ill = random.choice(['no', 'yes'], len(people))
            train, dev, test, report = optimize_traindevtest_split(
                np.zeros((len(people), 1)), ill, people, {'ill': ill}, weight=weight and dict(weight),
                dev_size=0.1, test_size=test_size, k=20, seed=seed)
            shares.append([len(dev) / len(people), len(test) / len(people)])
        dev, test = np.mean(shares, axis=0)
        print(f'dev_size 0.1, test_size {test_size}, weight {weight}: dev set {dev:.0%} of the rows, test set {test:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

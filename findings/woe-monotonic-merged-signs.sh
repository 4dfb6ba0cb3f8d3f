#!/usr/bin/env bash
# woe-monotonic-binning merges neighbouring bins whose weights of evidence are opposite, since it compares
# their absolute values: people of 60 % and 40 % defaults become one bin with a weight of 0.
#
# Packages: woe-monotonic-binning 0.5.3, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, joblib 1.6.0.
# Behaviour: with merge_threshold, woe_binning merges neighbours where the difference of the absolute
#   weights is at most this share of the first one. Weights of 0.4 and -0.4 have none. Bins that are alike
#   and lie on the same side of 0 are kept if their weights differ by more than the share.
# Expected: neighbours are merged where their weights are close to each other, |a - b|.
# Why it matters here: the step through 0 separates those who are better and worse than the average.
# Instead: leave merge_threshold out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'woe-monotonic-binning==0.5.3' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'joblib==1.6.0'
cat > expected.txt <<'EXPECTED'
merge_threshold None: 80% +1.39, 60% +0.41, 40% -0.41, 20% -1.39; information value 0.91
merge_threshold 0.05: 80% +1.39, 50% +0.00, 20% -1.39; information value 0.83
merge_threshold 0.5: 80% +1.39, 50% +0.00, 20% -1.39; information value 0.83
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from woe_monotonic_binning.binning import woe_binning

RATES = (0.80, 0.60, 0.40, 0.20)
rows = []
for level, rate in enumerate(RATES):
    defaults = round(1000 * rate)
    rows += [(1, float(level))] * defaults + [(0, float(level))] * (1000 - defaults)
table = pd.DataFrame(rows, columns=['default', 'debt'])
for threshold in (None, 0.05, 0.5):
    bins = woe_binning('default', table, n_threshold=200, merge_threshold=threshold)
    weights = ', '.join(f'{rate:.0%} {weight:+.2f}' for rate, weight in zip(bins['mean'], bins.woe + 0.0))
    print(f'merge_threshold {threshold}: {weights}; information value {bins.iv_components.sum():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

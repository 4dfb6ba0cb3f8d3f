#!/usr/bin/env bash
# woe-conversion ignores the weights of people where it counts a number and uses them for the totals, so that all weights
# of evidence of the number are too large.
#
# Packages: woe-conversion 0.3.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: for a continuous variable the weighted counts of each bin are computed and then overwritten by the plain
#   counts, while the totals of both classes stay weighted. Where non-defaulters were sampled one in ten and have
#   a weight of 10, all weights of evidence are too large by log(10), and the mean one is no longer near 0. The
#   same variable as text is weighted right.
# Expected: both with weights, as for text.
# Instead: cut the variable into bins before and pass them as text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'woe-conversion==0.3.0'
cat > expected.txt <<'EXPECTED'
group 0: as a number 1.80, as text -0.99, by hand -0.99
group 1: as a number 1.80, as text -0.15, by hand -0.15
group 2: as a number 2.46, as text 0.15, by hand 0.15
group 3: as a number 2.82, as text 0.51, by hand 0.51
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from woe_conversion.woe import WoeConversion

random = np.random.default_rng(0)
bins = random.integers(0, 4, size=20000)
defaulted = (random.random(20000) < 0.05 + 0.05 * bins).astype(int)
kept = (defaulted == 1) | (random.random(20000) < 0.1)
data = pd.DataFrame({'number': bins.astype(float), 'text': [f'group {x}' for x in bins], 'defaulted': defaulted,
                     'weight': np.where(defaulted == 1, 1.0, 10.0)})[kept].reset_index(drop=True)
model = WoeConversion(binarytarget='defaulted', features=['number', 'text'], nbins=4, weights='weight')
model.fit(data)
seen = model.transform(data)
for group in range(4):
    rows = data.number == group
    shares = [data.weight[rows & (data.defaulted == y)].sum() / data.weight[data.defaulted == y].sum() for y in (1, 0)]
    place = np.flatnonzero(rows)[0]
    print(f'group {group}: as a number {seen.number.iloc[place]:.2f}, as text {seen.text.iloc[place]:.2f}, '
          f'by hand {np.log(shares[0] / shares[1]):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

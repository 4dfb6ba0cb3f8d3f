#!/usr/bin/env bash
# afrikana-risk gives the safest customers the lowest scores.
#
# Packages: afrikana-risk 1.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: the weight of evidence of ScorecardBuilder is the logarithm of bad to good and its
#   regression predicts a default. score adds the log-odds of a default to the offset, so that more
#   points are more risk; it is documented as "higher = lower risk". score_to_pd reads them as odds
#   of good to bad, on the half-and-half basis of balanced class weights: the quarter of which 3 %
#   default has a probability of 71 %, the quarter of which 10 % default one of 36 %. The points of
#   scorecard_table have the other sign, so that they do not add up to the score.
# Expected: a higher score for fewer defaults, and probabilities near the shares that defaulted.
# Instead: add the points of scorecard_table, and calibrate the probability on the data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'afrikana-risk==1.0.0'
cat > expected.txt <<'EXPECTED'
described as: Compute individual credit scores (higher = lower risk).
lowest scores: 2.9% default, stated probability 70.9%, mean age 56
second scores: 4.3% default, stated probability 57.7%, mean age 47
third scores: 7.8% default, stated probability 47.1%, mean age 40
highest scores: 10.3% default, stated probability 35.7%, mean age 33
points of age (19.999, 24.0]: 220, 12.4% default
points of age (65.0, 69.0]: 270, 2.8% default
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from afrikana_risk.credit.scorecard import ScorecardBuilder

random = np.random.default_rng(0)
age = random.integers(20, 70, 20000)
income = random.normal(size=20000)
risk = 1 / (1 + np.exp(3 + 0.04 * (age - 45) + 0.5 * income))
table = pd.DataFrame({'age': age, 'income': income, 'default': (random.random(20000) < risk).astype(int)})
builder = ScorecardBuilder().fit(table, feature_cols=['age', 'income'])
print('described as:', builder.score.__doc__)
table['score'] = builder.score(table)
table['probability'] = builder.score_to_pd(table['score'])
table['quarter'] = pd.qcut(table['score'], 4, labels=('lowest', 'second', 'third', 'highest'))
for quarter, rows in table.groupby('quarter', observed=True):
    print(f"{quarter} scores: {rows['default'].mean():.1%} default,",
          f"stated probability {rows['probability'].mean():.1%}, mean age {rows['age'].mean():.0f}")
points = builder.scorecard_table().query("variable == 'age'")
for row in points.iloc[[0, -1]].itertuples():
    print(f'points of age {row.bin}: {row.points}, {row.events / row.total:.1%} default')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

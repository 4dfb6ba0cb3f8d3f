#!/usr/bin/env bash
# The points of woe-credit-scoring add the intercept where they should subtract it: people of whom 95 % pay
# have a score of 370, below the 400 that stand for even odds.
#
# Packages: woe-credit-scoring 3.0.1, scikit-learn 1.9.1, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: the coefficients of the regression of defaults enter with a minus sign, so a higher score is a
#   lower risk. The intercept enters with a plus sign. Differences between people are right, and all scores
#   are wrong by twice the intercept times the factor: -115 points for 12 % of defaults, more for fewer.
# Expected: base_score where good and bad are as base_odds says, and pdo points more where they double: the
#   score is offset + factor * log odds of paying.
# Why it matters here: a limit in points means other odds than it says, and two scorecards with different
#   rates of default have no common scale, which the scale is made for.
# Instead: offset - factor * decision_function of the regression.
# Source: Siddiqi, Credit Risk Scorecards, on scaling, the source that the package names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'woe-credit-scoring==3.0.1' 'scikit-learn==1.9.1' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
36% defaults: old, own: 17.9% defaults, score by the odds 444, found 409
36% defaults: young, rent: 56.4% defaults, score by the odds 393, found 358
12% defaults: old, own: 4.4% defaults, score by the odds 489, found 370
12% defaults: young, rent: 21.3% defaults, score by the odds 438, found 320
2% defaults: old, own: 0.6% defaults, score by the odds 547, found 310
2% defaults: young, rent: 3.1% defaults, score by the odds 499, found 263
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from woe_credit_scoring import CreditScoring, WoeEncoder

PDO, BASE_SCORE = 20, 400
random = np.random.default_rng(0)
people = pd.DataFrame({'age': random.choice(['old', 'young'], 20_000),
                       'home': random.choice(['own', 'rent'], 20_000)})
for intercept in (-1.5, -3.0, -5.0):
    logits = intercept + 1.0 * (people.age == 'young') + 0.7 * (people.home == 'rent')
    default = pd.Series((random.random(len(people)) < 1 / (1 + np.exp(-logits))).astype(int))
    encoder = WoeEncoder()
    encoder.fit(people, default)
    weights = encoder.transform(people)
    model = LogisticRegression(C=1e6).fit(weights, default)
    scoring = CreditScoring(pdo=PDO, base_score=BASE_SCORE, base_odds=1)
    scoring.fit(weights, encoder, model)
    table = people.assign(default=default, score=scoring.transform(people).score)
    for (age, home), group in table.groupby(['age', 'home']):
        rate = group.default.mean()
        right = BASE_SCORE + PDO * np.log2((1 - rate) / rate)
        if age[0] + home[0] in ('oo', 'yr'):
            print(f'{default.mean():.0%} defaults: {age}, {home}: {rate:.1%} defaults, score by the odds '
                  f'{right:.0f}, found {group.score.mean():.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

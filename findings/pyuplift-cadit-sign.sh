#!/usr/bin/env bash
# The Cadit model of pyuplift predicts the effect with the wrong sign: who gains 2 from the treatment is predicted to
# lose 2, and the best tenth of the people is the worst.
#
# Packages: pyuplift 0.0.4.1, scikit-learn 1.6.1, pandas 2.2.3, numpy 1.26.4.
# Behaviour: the outcome of a treated person is multiplied by minus the inverse of the share of the untreated, and the
#   one of an untreated person by plus the inverse of the share of the treated. The method has a plus for the treated,
#   a minus for the others, and each divided by the share of their own group.
# Expected: effects of about 2 on average, as from the model with two regressions beside it.
# Why it matters here: the people with the highest predictions are treated.
# Instead: TwoModel, or the transformed outcome by hand, as below.
# Source: Weisberg and Pontes (2015), "Post hoc subgroups in clinical trials: anathema or analytics?", Clinical Trials
#   12(4): the mean of the transformed outcome, given the features, is the effect.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyuplift==0.0.4.1' 'scikit-learn==1.6.1' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
50% treated, Cadit: mean effect -2.0 of 2.0, true effect of the tenth with the highest prediction -3.3
50% treated, TwoModel: mean effect 2.0 of 2.0, true effect of the tenth with the highest prediction 7.3
50% treated, by hand: mean effect 2.0 of 2.0, true effect of the tenth with the highest prediction 7.3
20% treated, Cadit: mean effect -1.9 of 2.0, true effect of the tenth with the highest prediction 1.1
20% treated, TwoModel: mean effect 2.0 of 2.0, true effect of the tenth with the highest prediction 7.3
20% treated, by hand: mean effect 1.9 of 2.0, true effect of the tenth with the highest prediction 7.3
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyuplift.variable_selection import Cadit, TwoModel
from sklearn.linear_model import LinearRegression

random = np.random.default_rng(0)
people = 20000
for share in (0.5, 0.2):
    features = random.normal(size=(people, 2))
    treated = (random.random(people) < share).astype(int)
    effect = 2 + 3 * features[:, 0]
    outcome = features[:, 1] + treated * effect + random.normal(size=people)
    by_hand = np.where(treated == 1, 1 / treated.mean(), -1 / (1 - treated.mean())) * (outcome - outcome.mean())
    found = {
        'Cadit': Cadit().fit(features, outcome, treated).predict(features),
        'TwoModel': TwoModel().fit(features, outcome, treated).predict(features),
        'by hand': LinearRegression().fit(features, by_hand).predict(features),
    }
    for name, predicted in found.items():
        best = np.argsort(-predicted)[: people // 10]
        print(f'{share:.0%} treated, {name}: mean effect {predicted.mean():.1f} of {effect.mean():.1f}, true effect of '
              f'the tenth with the highest prediction {effect[best].mean():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

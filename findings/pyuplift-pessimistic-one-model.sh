#!/usr/bin/env bash
# The Pessimistic model of pyuplift fits one classifier twice, for two classes and then for four, and reads the first
# prediction from the second fit: its correlation with the true effect is 0.4, of the two parts 0.9.
#
# Packages: pyuplift 0.0.4.1, scikit-learn 1.6.1, pandas 2.2.3, numpy 1.26.4.
# Behaviour: the model is the mean of the weighted Lai model and of the reflective one. Both get the same classifier
#   object. The second fit replaces the first, and Lai then takes the probabilities of treated responders and of
#   untreated people without response for the ones of its two classes.
# Expected: the mean of the two models, each with its own classifier.
# Why it matters here: nothing but the ranking of the people is used.
# Instead: fit the two models with a classifier each and take the mean, as below.
# Source: Shaar, Abdessalem and Segard (2016), "Pessimistic uplift modeling": the mean of both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyuplift==0.0.4.1' 'scikit-learn==1.6.1' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
Lai: correlation with the true effect 0.94, true effect of the tenth with the highest prediction 0.34
Reflective: correlation with the true effect 0.97, true effect of the tenth with the highest prediction 0.35
mean of both by hand: correlation with the true effect 0.96, true effect of the tenth with the highest prediction 0.35
Pessimistic: correlation with the true effect 0.36, true effect of the tenth with the highest prediction 0.13
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyuplift.transformation import Lai, Pessimistic, Reflective
from sklearn.linear_model import LogisticRegression

random = np.random.default_rng(0)
people = 20000
features = random.normal(size=(people, 2))
treated = random.integers(0, 2, people)


def risk(treatment):
    return 1 / (1 + np.exp(-(features[:, 1] - 1 + treatment * features[:, 0])))


responded = (random.random(people) < risk(treated)).astype(int)
effect = risk(1) - risk(0)
both = [
    Lai(LogisticRegression(), use_weights=True).fit(features, responded, treated).predict(features),
    Reflective(LogisticRegression()).fit(features, responded, treated).predict(features),
]
found = {
    'Lai': both[0], 'Reflective': both[1], 'mean of both by hand': np.mean(both, axis=0),
    'Pessimistic': Pessimistic(LogisticRegression()).fit(features, responded, treated).predict(features),
}
for name, predicted in found.items():
    best = np.argsort(-predicted)[: people // 10]
    print(f'{name}: correlation with the true effect {np.corrcoef(predicted, effect)[0, 1]:.2f}, true effect of the '
          f'tenth with the highest prediction {effect[best].mean():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The classifier of statinf gives the class whose mean is farthest away the highest probability: by its probabilities
# 0 % of the people are classified rightly, by its predictions all.
#
# Packages: statinf 1.3.0, pycof 1.5.15, jax 0.6.1, jaxlib 0.6.1, numpy 1.26.4, pandas 2.2.3, scipy 1.11.4,
#   matplotlib 3.11.2.
# Behaviour: for classes with one covariance, GGM.predict takes the smallest distance, and predict_proba the exponential
#   of the same distance without a minus.
# Expected: the probability that falls with the distance: exp(-d²/2) for each class, divided by their sum.
# Why it matters here: a risk is reported to a patient, the class is not.
# Instead: scikit-learn's LinearDiscriminantAnalysis, or the formula below.
# Source: Bishop (2006), "Pattern recognition and machine learning", section 4.2.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statinf==1.3.0' 'pycof==1.5.15' 'jax==0.6.1' 'jaxlib==0.6.1' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.11.4' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
means 1 apart: 76% right by predict, 24% by predict_proba; mean risk of the ill 0.27, by hand 0.68
means 2 apart: 93% right by predict, 7% by predict_proba; mean risk of the ill 0.08, by hand 0.90
means 4 apart: 100% right by predict, 0% by predict_proba; mean risk of the ill 0.00, by hand 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from statinf.stats import GGM

random = np.random.default_rng(0)
for distance in (1, 2, 4):
    ill = np.repeat([0, 1], 500)
    values = random.normal(size=(1000, 2)) + distance * ill[:, None]
    model = GGM()
    model.fit(values, ill, 2)
    probabilities = model.predict_proba(values)
    likelihood = np.exp(-((values[:, None] - model.class_means[None]) ** 2).sum(axis=2) / 2)
    right = likelihood[:, 1] / likelihood.sum(axis=1)
    print(f'means {distance} apart: {(model.predict(values) == ill).mean():.0%} right by predict, '
          f'{(probabilities.argmax(axis=1) == ill).mean():.0%} by predict_proba; mean risk of the ill '
          f'{probabilities[ill == 1, 1].mean():.2f}, by hand {right[ill == 1].mean():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

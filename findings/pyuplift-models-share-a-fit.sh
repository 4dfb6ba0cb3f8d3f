#!/usr/bin/env bash
# Two models of pyuplift without arguments share one fit: after the second is fitted to other data, the first predicts
# what the second does.
#
# Packages: pyuplift 0.0.4.1, scikit-learn 1.6.1, pandas 2.2.3, numpy 1.26.4.
# Behaviour: the default classifier or regression is an object that is made once, when the class is defined, and each
#   model without an own one fits this object. Models of one kind for two outcomes, or for two hospitals, are the last
#   one that was fitted.
# Expected: a regression of its own for each model, as in scikit-learn, whose estimators clone.
# Why it matters here: models are compared, or kept in a dictionary by outcome.
# Instead: pass a new regression to each model.
# Source: scikit-learn, "Developing scikit-learn estimators": no mutable objects as defaults of parameters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyuplift==0.0.4.1' 'scikit-learn==1.6.1' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
TwoModel: mean effect 1.98, and -5.02 after another model was fitted
TwoModel with own regressions: mean effect 1.98, and 1.98 after another model was fitted
Dummy: mean effect 1.98, and -5.02 after another model was fitted
Jaskowski: mean effect 0.52, and -0.23 after another model was fitted
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyuplift.transformation import Jaskowski
from pyuplift.variable_selection import Dummy, TwoModel
from sklearn.linear_model import LinearRegression

random = np.random.default_rng(0)
features, treated = random.normal(size=(4000, 2)), np.arange(4000) % 2
gain = features[:, 0] + 2 * treated + random.normal(size=4000)
cost = features[:, 1] - 5 * treated + random.normal(size=4000)


def show(name, make, first, second):
    model = make().fit(features, first, treated)
    before = model.predict(features).mean()
    make().fit(features, second, treated)
    print(f'{name}: mean effect {before:.2f}, and {model.predict(features).mean():.2f} after another model was fitted')


show('TwoModel', TwoModel, gain, cost)
show('TwoModel with own regressions', lambda: TwoModel(LinearRegression(), LinearRegression()), gain, cost)
show('Dummy', Dummy, gain, cost)
show('Jaskowski', Jaskowski, (gain > 1).astype(int), (cost > 1).astype(int))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

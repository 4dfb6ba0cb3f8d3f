#!/usr/bin/env bash
# The index of agreement of regressionmetrics, between 0 and 1 by its description, depends on the unit: one
# prediction has 1.00 in grams, 0.70 in kilograms and -300,238 in tonnes.
#
# Packages: regressionmetrics 1.4.0, numpy 2.4.6, scikit-learn 1.9.1.
# Behaviour: WillMottIndexAgreeMent squares the product of the two distances from the mean where the index has
#   the square of their sum, so that the fraction has a unit.
# Expected: 1 - Σ(O - P)² / Σ(|P - mean O| + |O - mean O|)², the same in all units.
# Instead: that formula, as below.
# Source: Willmott, On the validation of models, Physical Geography 2, 1981, which it cites.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'regressionmetrics==1.4.0'
cat > expected.txt <<'EXPECTED'
good prediction in grams: regressionmetrics 1.00, by hand 0.96; efficiency 0.82
good prediction in kilograms: regressionmetrics 0.70, by hand 0.96; efficiency 0.82
good prediction in tonnes: regressionmetrics -300238.44, by hand 0.96; efficiency 0.82
by chance prediction in grams: regressionmetrics 1.00, by hand 0.43; efficiency -0.89
by chance prediction in kilograms: regressionmetrics -7.39, by hand 0.43; efficiency -0.89
by chance prediction in tonnes: regressionmetrics -8386686.95, by hand 0.43; efficiency -0.89
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from regressionmetrics.metrics import NashSutCoeff, WillMottIndexAgreeMent

random = np.random.default_rng(0)
weight = random.normal(3.4, 0.5, 200)
models = {'good': weight + random.normal(0, 0.2, 200), 'by chance': random.permutation(weight)}
for name, predicted in models.items():
    for unit, factor in (('grams', 1000.0), ('kilograms', 1.0), ('tonnes', 0.001)):
        truth, found = factor * weight, factor * predicted
        centre = truth.mean()
        right = 1 - ((truth - found) ** 2).sum() / ((abs(found - centre) + abs(truth - centre)) ** 2).sum()
        print(f'{name} prediction in {unit}: regressionmetrics {WillMottIndexAgreeMent(truth, found):.2f}, '
              f'by hand {right:.2f}; efficiency {NashSutCoeff(truth, found):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

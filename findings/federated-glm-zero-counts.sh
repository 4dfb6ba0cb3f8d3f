#!/usr/bin/env bash
# The Poisson deviance of federated-glm is NaN as soon as one of the counts is 0, for the best model and the worst.
#
# Packages: federated-glm 0.2.0, statsmodels 0.14.6, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6, pandas 3.1.1.
# Behaviour: ModelEvaluator.evaluate(y_true, y_pred, 'poisson') computes y log(y / mu). For y = 0 that is 0 times
#   minus infinity. The predictions are kept away from 0 ("avoid log(0)"), the counts, which are the ones that are
#   0, are not. Whoever compares models by it with min() or sort gets the order of the list.
# Expected: 0 log 0 = 0, as the deviance is defined: a count of 0 adds 2 mu.
# Why it matters here: most people have no claim, no fall and no readmission in a month.
# Instead: sklearn.metrics.mean_poisson_deviance times the number of counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'federated-glm==0.2.0' 'statsmodels==0.14.6' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'numpy==2.4.6' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
visits, mean 20, true means: counts of 0 0%; deviance 977, federated-glm 977
visits, mean 20, one mean for all: counts of 0 0%; deviance 2691, federated-glm 2691
falls, mean 0.3, true means: counts of 0 75%; deviance 801, federated-glm nan
falls, mean 0.3, one mean for all: counts of 0 75%; deviance 829, federated-glm nan
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from federated_glm import ModelEvaluator
from sklearn.metrics import mean_poisson_deviance

random = np.random.default_rng(0)
for name, rate in (('visits, mean 20', 20), ('falls, mean 0.3', 0.3)):
    means = rate * random.uniform(0.5, 1.5, 1000)
    counts = random.poisson(means)
    for model, predicted in (('true means', means), ('one mean for all', np.full(1000, counts.mean()))):
        found = ModelEvaluator.evaluate(counts, predicted, 'poisson')['poisson_deviance']
        right = 1000 * mean_poisson_deviance(counts, predicted)
        print(f'{name}, {model}: counts of 0 {np.mean(counts == 0):.0%}; deviance {right:.0f}, federated-glm {found:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

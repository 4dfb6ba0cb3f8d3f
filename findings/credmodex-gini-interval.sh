#!/usr/bin/env bash
# credmodex's interval of a Gini coefficient is NaN for ordinary scorecards.
#
# Packages: credmodex 0.2.8 (its file alone: the package states Python 3.8 and later and imports
#   from 3.12 on), numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: gini_variance computes the variance of Engelmann, Hayden and Tasche. Their formula for
#   the area subtracts 4 (N - 1) (area - 1/2)², which is (N - 1) Gini². The code subtracts 4 (N - 1)
#   Gini². From a Gini of about 0.3 on the variance is negative and the ends of the 95 % interval
#   are NaN, without a warning; below, the interval is too narrow.
# Expected: the variance that drawing the people again gives.
# Instead: four times the variance of delong_roc_variance, before it is rounded.
# Source: Engelmann, Hayden and Tasche, Measuring the Discriminative Power of Rating Systems, 2003.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credmodex==0.2.8'
cat > expected.txt <<'EXPECTED'
Gini 0.17: variance 0.0006, 95 % from 0.12 to 0.21; drawn again 0.0007, 0.11 to 0.22
Gini 0.28: variance 0.0001, 95 % from 0.26 to 0.31; drawn again 0.0007, 0.23 to 0.33
Gini 0.45: variance -0.0008, 95 % from nan to nan; drawn again 0.0005, 0.41 to 0.50
Gini 0.73: variance -0.0031, 95 % from nan to nan; drawn again 0.0003, 0.69 to 0.76
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

folder = Path(find_spec('credmodex').origin).parent / 'discriminancy' / 'goodness_of_fit'
spec = spec_from_file_location('goodness_of_fit', folder / 'goodness_of_fit.py')
module = module_from_spec(spec)
spec.loader.exec_module(module)
fit = module.GoodnessFit

people = 2000
for strength in (0.3, 0.5, 1.0, 2.0):
    draw = np.random.RandomState(1)
    x = draw.normal(size=people)
    probability = 1 / (1 + np.exp(-(strength * x - 1)))
    outcome = (draw.uniform(size=people) < probability).astype(int)
    seen = fit.gini_variance(outcome, 1 - probability, info=True)
    again = []
    for _ in range(500):
        rows = draw.randint(people, size=people)
        again.append(2 * roc_auc_score(outcome[rows], probability[rows]) - 1)
    print(f'Gini {seen["Gini"]:.2f}: variance {seen["Var (Engelmann)"]:.4f}, 95 % from {seen["Gini CI Lower"]:.2f}',
          f'to {seen["Gini CI Upper"]:.2f}; drawn again {np.var(again):.4f},',
          f'{np.quantile(again, 0.025):.2f} to {np.quantile(again, 0.975):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# credmodex rounds the variances of its DeLong test before it compares.
#
# Packages: credmodex 0.2.8 (its file alone: the package states Python 3.8 and later and imports
#   from 3.12 on), numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: compare_auc_delong takes the areas and variances from delong_roc_variance, which rounds
#   both to four decimals. The variance for 5,000 people becomes 0.0001 or 0, and the one for 20,000
#   people 0, so that any difference that four decimals show has an infinite statistic and a p-value
#   of 0.
# Expected: p-values from the variances as they are, here above 0.5 for all.
# Instead: the variances by hand, as below, or a DeLong test with the covariance of the two models,
#   which the documentation leaves out.
# Source: DeLong, DeLong and Clarke-Pearson, Biometrics 1988.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credmodex==0.2.8'
cat > expected.txt <<'EXPECTED'
1000 people: areas 0.7365 and 0.7335, p-value 0.90; without rounding 0.90
5000 people: areas 0.7478 and 0.7472, p-value 0.97; without rounding 0.95
20000 people: areas 0.7401 and 0.7395, p-value 0.00; without rounding 0.91
100000 people: areas 0.7436 and 0.7423, p-value 0.00; without rounding 0.59
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
from scipy.stats import norm, rankdata

folder = Path(find_spec('credmodex').origin).parent / 'discriminancy' / 'goodness_of_fit'
spec = spec_from_file_location('goodness_of_fit', folder / 'goodness_of_fit.py')
module = module_from_spec(spec)
spec.loader.exec_module(module)
fit = module.GoodnessFit

for people in (1000, 5000, 20000, 100000):
    draw = np.random.RandomState(people)
    x = draw.normal(size=people)
    outcome = (draw.uniform(size=people) < 1 / (1 + np.exp(-(x - 1)))).astype(int)
    scores = [1 / (1 + np.exp(-(x - 1))), 1 / (1 + np.exp(-(x + 0.1 * draw.normal(size=people) - 1)))]
    areas, variances = [], []
    for score in scores:
        bad, good = rankdata(score)[outcome == 1], rankdata(score)[outcome == 0]
        v10 = (bad - rankdata(score[outcome == 1])) / (outcome == 0).sum()
        v01 = 1 - (good - rankdata(score[outcome == 0])) / (outcome == 1).sum()
        areas.append(v10.mean())
        variances.append(v10.var(ddof=1) / v10.size + v01.var(ddof=1) / v01.size)
    z = (areas[0] - areas[1]) / np.sqrt(sum(variances))
    seen = fit.compare_auc_delong(outcome, [1 - score for score in scores])[0]
    print(f'{people} people: areas {areas[0]:.4f} and {areas[1]:.4f}, p-value {seen["p_value"]:.2f};',
          f'without rounding {2 * norm.sf(abs(z)):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

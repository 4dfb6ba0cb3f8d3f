#!/usr/bin/env bash
# credmodex's corrected AIC belongs to the opposite model.
#
# Packages: credmodex 0.2.8 (its file alone: the package states Python 3.8 and later and imports
#   from 3.12 on), numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: aic_small_sample is documented as AIC + 2 k (k + 1) / (n - k - 1). It turns the
#   probabilities round where they are the ones of class 0, and then calls aic, which turns them
#   round as well, its default. With prob_base_0=False it turns them round once, where nothing
#   should be. So both settings return the criterion of 1 - p, and the model that predicts worst has
#   the lowest.
# Expected: a difference from aic of 0.01 for three parameters and 1000 people.
# Instead: aic plus the correction.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credmodex==0.2.8'
cat > expected.txt <<'EXPECTED'
right, prob_base_0=True: AIC 1075.5, corrected 2593.1, by hand 1075.6
right, prob_base_0=False: AIC 1075.5, corrected 2593.1, by hand 1075.6
mean for all, prob_base_0=True: AIC 1190.0, corrected 2029.3, by hand 1190.0
mean for all, prob_base_0=False: AIC 1190.0, corrected 2029.3, by hand 1190.0
reversed, prob_base_0=True: AIC 2593.1, corrected 1075.6, by hand 2593.1
reversed, prob_base_0=False: AIC 2593.1, corrected 1075.6, by hand 2593.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

folder = Path(find_spec('credmodex').origin).parent / 'discriminancy' / 'goodness_of_fit'
spec = spec_from_file_location('goodness_of_fit', folder / 'goodness_of_fit.py')
module = module_from_spec(spec)
spec.loader.exec_module(module)
fit = module.GoodnessFit

draw = np.random.RandomState(0)
x = draw.normal(size=1000)
probability = 1 / (1 + np.exp(-(x - 1)))
outcome = (draw.uniform(size=1000) < probability).astype(int)
models = {'right': probability, 'mean for all': np.full(1000, outcome.mean()), 'reversed': 1 - probability}
for name, p in models.items():
    for base in (True, False):
        given = 1 - p if base else p
        print(f'{name}, prob_base_0={base}: AIC {fit.aic(outcome, given, 3, prob_base_0=base):.1f}, corrected',
              f'{fit.aic_small_sample(outcome, given, 3, 1000, prob_base_0=base):.1f}, by hand',
              f'{fit.aic(outcome, given, 3, prob_base_0=base) + 2 * 3 * 4 / (1000 - 3 - 1):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

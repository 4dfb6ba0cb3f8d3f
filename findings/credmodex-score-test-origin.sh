#!/usr/bin/env bash
# credmodex's score test depends on the origin of the variable.
#
# Packages: credmodex 0.2.8 (its file alone: the package states Python 3.8 and later and imports
#   from 3.12 on), numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2, statsmodels 0.14.5.
# Behaviour: rao_score_test divides the squared score by the sum of x² var, without the part of x
#   that the model explains already, its mean at least. For a model with an intercept the score is
#   the same if a constant is added to x, and the sum grows: counted from 0 the age has a tenth of
#   the statistic that it has counted from 50, and the year of birth a ten-thousandth.
# Expected: one statistic for a variable, whatever its origin; the one of statsmodels.
# Instead: give the residuals of x from a weighted regression on the variables of the model, here x
#   minus its mean.
# Source: Rao 1948; statsmodels, GLMResults.score_test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2' 'statsmodels==0.14.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credmodex==0.2.8'
cat > expected.txt <<'EXPECTED'
age: statistic 3.27, p-value 0.0706; statsmodels 31.67, 0.0000
age beyond 20: statistic 7.64, p-value 0.0057; statsmodels 31.67, 0.0000
age beyond 50: statistic 31.66, p-value 0.0000; statsmodels 31.67, 0.0000
year of birth: statistic 0.00, p-value 0.9613; statsmodels 31.67, 0.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
from statsmodels.genmod.families import Binomial
from statsmodels.genmod.generalized_linear_model import GLM

folder = Path(find_spec('credmodex').origin).parent / 'discriminancy' / 'goodness_of_fit'
spec = spec_from_file_location('goodness_of_fit', folder / 'goodness_of_fit.py')
module = module_from_spec(spec)
spec.loader.exec_module(module)
fit = module.GoodnessFit

draw = np.random.RandomState(3)
age = draw.uniform(20, 80, size=2000)
outcome = (draw.uniform(size=2000) < 1 / (1 + np.exp(-(0.02 * (age - 50) - 2)))).astype(int)
predicted = np.full(2000, outcome.mean())
variables = {'age': age, 'age beyond 20': age - 20, 'age beyond 50': age - 50, 'year of birth': 2026 - age}
for name, x in variables.items():
    seen = fit.rao_score_test(predicted, outcome, x, family='binomial', info=True)
    chi2, p, _ = GLM(outcome, np.ones(2000), family=Binomial()).fit().score_test(exog_extra=x[:, None])
    print(f'{name}: statistic {seen["Score_Chi2"]:.2f}, p-value {seen["p_value"]:.4f};',
          f'statsmodels {chi2.item():.2f}, {p.item():.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

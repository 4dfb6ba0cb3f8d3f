#!/usr/bin/env bash
# credmodex's score test takes families for others whose name they contain.
#
# Packages: credmodex 0.2.8 (its file alone: the package states Python 3.8 and later and imports
#   from 3.12 on), numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: rao_score_test looks for "binom" in the name of the family first, which "negative
#   binomial" and "quasibinomial" contain as well, then for "poisson", and for "gauss" before
#   "inverse gaussian". So a negative binomial model of counts has the variance m (1 - m), which is
#   negative for a mean above 1: the statistic is negative, and its p-value 1. The dispersion of the
#   quasi families, which is documented as used in them, is ignored. The dispersion of the negative
#   binomial family is the significance level, alpha.
# Expected: m + a m² for the negative binomial family; the statistic divided by phi for the quasi
#   families.
# Instead: divide the score by your own variance, as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credmodex==0.2.8'
cat > expected.txt <<'EXPECTED'
poisson: statistic 159.8, p-value 0.000, Variable Significantly Improve the Model; by hand 159.8
quasipoisson: statistic 159.8, p-value 0.000, Variable Significantly Improve the Model; by hand 63.9
negative binomial: statistic -82.2, p-value 1.000, Variable Do Not Improve the Model; by hand 139.3
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
x = draw.normal(size=500)
count = draw.poisson(3 * np.exp(0.3 * x) * draw.gamma(2, 0.5, size=500))
mean = np.full(500, count.mean())
score = (x * (count - mean)).sum() ** 2
variances = {'poisson': mean, 'quasipoisson': 2.5 * mean, 'negative binomial': mean + 0.05 * mean**2}
for family, variance in variances.items():
    seen = fit.rao_score_test(mean, count, x, family=family, phi=2.5, alpha=0.05, info=True)
    print(f'{family}: statistic {seen["Score_Chi2"]:.1f}, p-value {seen["p_value"]:.3f}, {seen["conclusion"]};',
          f'by hand {score / (x**2 * variance).sum():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Cox model of FederatedHPLearning depends on the order of the rows where people die at the same time: with
# survival in whole years a log hazard ratio is 1.32 or 0.74, by which group is listed first.
#
# Packages: FederatedHPLearning 1.0.2, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1,
#   matplotlib 3.11.2.
# Behaviour: the people at risk at a death are taken to be all rows from it on in the sorted table. Of people
#   with one time, the first has all others at risk and the last has none of them.
# Expected: everybody whose time is not earlier, for each death (Breslow), which no order changes.
# Why it matters here: survival in registries is in months or years.
# Instead: times without ties, or the loss below.
# Source: Breslow, discussion of Cox's Regression Models and Life-Tables, J. R. Stat. Soc. B 34, 1972.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'FederatedHPLearning==1.0.2'
cat > expected.txt <<'EXPECTED'
days with fractions, treated first: log hazard ratio 1.03, by hand 1.03
days with fractions, treated last: log hazard ratio 1.03, by hand 1.03
days with fractions, shuffled: log hazard ratio 1.03, by hand 1.03
whole months, treated first: log hazard ratio 1.05, by hand 1.00
whole months, treated last: log hazard ratio 1.00, by hand 1.00
whole months, shuffled: log hazard ratio 1.02, by hand 1.00
whole years, treated first: log hazard ratio 1.32, by hand 0.77
whole years, treated last: log hazard ratio 0.74, by hand 0.77
whole years, shuffled: log hazard ratio 1.02, by hand 0.77
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from federated_hplearning.cox_numpy import compute_cox_likelihood_and_grad
from scipy.optimize import minimize_scalar

random = np.random.default_rng(0)
PEOPLE = 1000
group = np.arange(PEOPLE) % 2
days = random.exponential(3 * 365 * np.exp(-1.0 * group))


def package(times, x):
    order = np.argsort(times, kind='stable')
    return minimize_scalar(lambda w: compute_cox_likelihood_and_grad(
        np.array([w]), x[order, None].astype(float), times[order], np.ones(PEOPLE), alpha=0.0)[0],
        bounds=(-3, 3), method='bounded').x


def breslow(times, x):
    def loss(w):
        risk = np.exp(w * x)
        unique, place = np.unique(times, return_inverse=True)
        at_risk = np.bincount(place, risk)[::-1].cumsum()[::-1]
        return -(w * x - np.log(at_risk[place])).sum()
    return minimize_scalar(loss, bounds=(-3, 3), method='bounded').x


for name, times in (('days with fractions', days), ('whole months', np.ceil(days / 30.44)), ('whole years', np.ceil(days / 365.25))):
    for order, rows in (('treated first', np.argsort(-group, kind='stable')), ('treated last', np.argsort(group, kind='stable')),
                        ('shuffled', random.permutation(PEOPLE))):
        print(f'{name}, {order}: log hazard ratio {package(times[rows], group[rows]):.2f}, '
              f'by hand {breslow(times[rows], group[rows]):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

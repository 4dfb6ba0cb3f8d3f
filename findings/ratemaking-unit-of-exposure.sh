#!/usr/bin/env bash
# The Buehlmann-Straub credibility of ratemaking depends on the unit of the exposure: the same portfolio
# has a credibility of 1.00 counted in cars, and of 0.61 counted in thousands of cars, where 0.38 is right.
#
# Packages: ratemaking 0.3.1, actuarcredibility 0.1.1, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: buhlmann_straub divides the weighted squares within the risks by a sum of weights in place of
#   the number of observations less the number of risks. Its variance within is then one of an observation
#   and not of a unit of exposure, and K, which is compared with the exposure of a risk, has the wrong
#   unit.
# Expected: the same credibility for cars and thousands of cars, as in actuarcredibility and by hand, since
#   the exposure and K change together.
# Why it matters here: with exposures in the thousands each small risk keeps its own experience, as if
#   nothing had to be borrowed.
# Instead: actuarcredibility.BuhlmannStraubModel.
# Source: Buehlmann and Gisler, A Course in Credibility Theory, section 4.8: the mean of sum w (x - m)**2 /
#   (n - 1) over the risks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ratemaking==0.3.1' 'actuarcredibility==0.1.1' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
in cars: mean credibility by hand 0.38, actuarcredibility 0.38, ratemaking 1.00
in hundreds of cars: mean credibility by hand 0.38, actuarcredibility 0.38, ratemaking 0.94
in thousands of cars: mean credibility by hand 0.38, actuarcredibility 0.38, ratemaking 0.61
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from actuarcredibility import BuhlmannStraubModel
from ratemaking.credibility.buhlmann import BuhlmannStraubInputs, buhlmann_straub

RISKS, YEARS = 12, 5
random = np.random.default_rng(0)
cars = random.integers(500, 1500, (RISKS, 1)) * np.ones((RISKS, YEARS))
levels = random.normal(200, 20, (RISKS, 1))
costs = levels + random.normal(0, 1500, (RISKS, YEARS)) / np.sqrt(cars)


def compute_by_hand(weights):
    sums = weights.sum(axis=1)
    means = (weights * costs).sum(axis=1) / sums
    within = (weights * (costs - means[:, None])**2).sum() / (RISKS * (YEARS - 1))
    between = (sums * (means - np.average(means, weights=sums))**2).sum() - (RISKS - 1) * within
    between /= sums.sum() - (sums**2).sum() / sums.sum()
    return sums / (sums + within / between)


for name, unit in (('cars', 1), ('hundreds of cars', 100), ('thousands of cars', 1000)):
    weights = cars / unit
    rows = [(f'{risk:02}', costs[risk, year], weights[risk, year])
            for risk in range(RISKS) for year in range(YEARS)]
    found = buhlmann_straub(BuhlmannStraubInputs(rows)).Z_by_risk
    table = pd.DataFrame(rows, columns=['risk', 'cost', 'cars'])
    other = BuhlmannStraubModel().fit(table, 'risk', 'cost', 'cars')
    print(f'in {name}: mean credibility by hand {compute_by_hand(weights).mean():.2f}, actuarcredibility '
          f'{other.credibility_factor().mean():.2f}, ratemaking {np.mean(list(found.values())):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

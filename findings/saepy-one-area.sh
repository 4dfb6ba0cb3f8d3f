#!/usr/bin/env bash
# The bootstrap error of a small area in saepy is that of one area, more than a hundred times too large.
#
# Packages: saepy 0.2.0, numpy 2.2.6, scipy 1.15.3, pandas 2.2.3, patsy 1.0.1, statsmodels 0.14.4.
# Behaviour: pbmseBHF compares the name of the column of areas with itself, not its values. Its
#   bootstrap therefore has one area, with one random effect and one error for all observations, and
#   the areas that were asked for count as areas without a sample, whose effect is drawn anew. The
#   mean squared errors are larger than the variance between the areas, however much was observed in
#   them. It also prints each step.
# Expected: the error of the estimates, 0.12 for eight observations in each of fifteen areas with a
#   variance of 4 between and of 1 within them, as new samples from the same model show.
# Why it matters here: an area is published where its error is small.
# Instead: draw the bootstrap samples from the fitted model and call eblupBHF, which is right.
# Source: Gonzalez-Manteiga et al., Bootstrap mean squared error of a small-area EBLUP, 2008.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'pandas==2.2.3' 'patsy==1.0.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'saepy==0.2.0'
cat > expected.txt <<'EXPECTED'
8 people in each area: mean squared error by pbmseBHF about 20, of the estimates 0.12
32 people in each area: mean squared error by pbmseBHF about 20, of the estimates 0.03
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import logging

import numpy as np
import pandas as pd
from saePy.eblupBHF import eblupBHF
from saePy.pbmseBHF import pbmseBHF

logging.disable(logging.CRITICAL)
areas = np.arange(1.0, 16)
means = np.column_stack([areas, np.full(15, 5.0)])
sizes = np.column_stack([areas, np.full(15, 1000.0)])
for people in (8, 32):
    area = np.repeat(areas, people)
    x = np.random.default_rng(0).uniform(0, 10, len(area))

    def draw(seed):
        random = np.random.default_rng(seed)
        effects = random.normal(0, 2, 15)
        y = 1 + 2 * x + effects[area.astype(int) - 1] + random.normal(0, 1, len(area))
        return pd.DataFrame({'y': y, 'x': x, 'area': area}), 1 + 2 * 5 + effects

    np.random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        result = pbmseBHF('y ~ x', 'area', None, means, sizes, B=30, data=draw(3)[0])
    errors = []
    for seed in range(100, 150):
        table, truth = draw(seed)
        estimates = eblupBHF('y ~ x', 'area', None, means, sizes, data=table)['eblup']['eblup']
        errors.append((estimates - truth) ** 2)
    print(f'{people} people in each area: mean squared error by pbmseBHF about',
          f'{round(np.median(result["mse"]["mse"]), -1):.0f}, of the estimates {np.mean(errors):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

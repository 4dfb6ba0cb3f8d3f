#!/usr/bin/env bash
# The F statistic of a regression with an intercept in statinf is p/(p - 1) times the right one, twice for two
# variables, and infinite for one.
#
# Packages: statinf 1.3.0, pycof 1.5.15, jax 0.6.1, jaxlib 0.6.1, numpy 1.26.4, pandas 2.2.3, scipy 1.11.4,
#   matplotlib 3.11.2.
# Behaviour: the summary divides the explained sum of squares by the number of variables less one. This is right where
#   the column of ones is one of the variables; with fit_intercept it is not counted. The error is divided by n - p and
#   not by n - p - 1.
# Expected: the explained sum by p, the rest by n - p - 1; 1 on average where nothing has a relation.
# Why it matters here: the statistic is compared with a table, and two variables of chance are significant too often.
# Instead: the formula below.
# Source: Fisher (1925), "Statistical methods for research workers", chapter 7; any textbook.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statinf==1.3.0' 'pycof==1.5.15' 'jax==0.6.1' 'jaxlib==0.6.1' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.11.4' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
1 variables of chance: F of statinf inf on average, significant in 100%; by hand 1.03 and 6%
2 variables of chance: F of statinf 2.16 on average, significant in 22%; by hand 1.06 and 5%
3 variables of chance: F of statinf 1.63 on average, significant in 18%; by hand 1.07 and 6%
5 variables of chance: F of statinf 1.26 on average, significant in 12%; by hand 0.99 and 4%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from scipy.stats import f
from statinf.regressions import OLS

random = np.random.default_rng(0)
for variables in (1, 2, 3, 5):
    names = [f'v{number}' for number in range(variables)]
    found, right, people = [], [], 60
    for _ in range(200):
        table = pd.DataFrame(random.normal(size=(people, variables)), columns=names)
        table['y'] = random.normal(size=people)
        model = OLS('y ~ ' + ' + '.join(names), table, fit_intercept=True)
        found.append(model._fisher())
        explained = model.r_squared()
        right.append(explained / variables / ((1 - explained) / (people - variables - 1)))
    limit = f.ppf(0.95, variables, people - variables - 1)
    found, right = np.array(found), np.array(right)
    print(f'{variables} variables of chance: F of statinf {found.mean():.2f} on average, significant in '
          f'{(found > limit).mean():.0%}; by hand {right.mean():.2f} and {(right > limit).mean():.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

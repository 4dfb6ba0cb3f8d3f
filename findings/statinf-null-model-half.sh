#!/usr/bin/env bash
# McFadden's R² of statinf compares with a model that gives everybody a risk of one half: for a rare outcome, a model of
# pure chance explains 80 %.
#
# Packages: statinf 1.3.0, pycof 1.5.15, jax 0.6.1, jaxlib 0.6.1, numpy 1.26.4, pandas 2.2.3, scipy 1.11.4,
#   matplotlib 3.11.2.
# Behaviour: the model without variables is created and not fitted, so that its coefficients are 0. Its likelihood is
#   the one of a fair coin, and the R², the adjusted one and the likelihood ratio test of the summary are computed from
#   it.
# Expected: a model that gives everybody the frequency of the outcome, by which the R² of a useless variable is about 0.
# Why it matters here: diseases are rare, and the rarer, the better each model looks.
# Instead: the likelihood of the frequency, as below.
# Source: McFadden (1974), "Conditional logit analysis of qualitative choice behavior", in Frontiers in Econometrics:
#   the maximum with the constant alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statinf==1.3.0' 'pycof==1.5.15' 'jax==0.6.1' 'jaxlib==0.6.1' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.11.4' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
50% ill, variable without a relation: R² of statinf 0.000, by hand 0.000
20% ill, variable without a relation: R² of statinf 0.296, by hand 0.000
5% ill, variable without a relation: R² of statinf 0.719, by hand 0.001
1% ill, variable without a relation: R² of statinf 0.903, by hand 0.002
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from statinf.regressions import GLM

random = np.random.default_rng(0)
people = 4000
for frequency in (0.5, 0.2, 0.05, 0.01):
    table = pd.DataFrame({'chance': random.normal(size=people)})
    table['ill'] = (random.random(people) < frequency).astype(int)
    model = GLM('ill ~ chance', table, fit_intercept=True)
    model.fit()
    share = table['ill'].mean()
    constant = people * (share * np.log(share) + (1 - share) * np.log(1 - share))
    right = 1 - model._log_likelihood() / constant
    print(f'{frequency:.0%} ill, variable without a relation: R² of statinf {model.r_squared():.3f}, '
          f'by hand {right:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

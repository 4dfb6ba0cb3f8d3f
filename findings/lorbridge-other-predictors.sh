#!/usr/bin/env bash
# lorbridge leaves out all predictors but one of the matrix that it is given.
#
# Packages: lorbridge 0.1.0, statsmodels 0.15.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1.
# Behaviour: blr_continuous and blr_categorical take X, the predictor matrix of n rows and p
#   columns, and the name of the predictor of interest. The other columns are not in the model and
#   no message says so, so that the odds ratio and what is derived from it are not adjusted. A
#   treatment with an odds ratio of 0.5 for women and for men, given to the sicker men more often,
#   has one of 2.98 with the sex in X and without it.
# Expected: the coefficient of the predictor in a model with all columns.
# Instead: statsmodels.Logit with all columns, and ccm_from_lor for its coefficient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lorbridge==0.1.0' 'statsmodels==0.15.0' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
women: odds ratio of the treatment 0.50
men: odds ratio of the treatment 0.50
X with treated and male: lorbridge 2.98, statsmodels 0.50
X with treated: lorbridge 2.98, statsmodels 2.98
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
import statsmodels.api as sm
from lorbridge import blr_continuous

groups = [(0, 0, 32, 128), (0, 1, 4, 32), (1, 0, 20, 5), (1, 1, 80, 40)]
rows = []
for male, treated, events, others in groups:
    rows += [(male, treated, 1)] * events + [(male, treated, 0)] * others
table = pd.DataFrame(rows, columns=['male', 'treated', 'died'])
for male in (0, 1):
    counts = {treated: (events, others) for sex, treated, events, others in groups if sex == male}
    odds = [counts[treated][0] / counts[treated][1] for treated in (0, 1)]
    print(f"{('women', 'men')[male]}: odds ratio of the treatment {odds[1] / odds[0]:.2f}")
for columns in (['treated', 'male'], ['treated']):
    result = blr_continuous(table[columns], table['died'], predictor='treated')
    model = sm.Logit(table['died'], sm.add_constant(table[columns].astype(float))).fit(disp=0)
    print(f"X with {' and '.join(columns)}: lorbridge {result.or_:.2f}, statsmodels {np.exp(model.params['treated']):.2f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

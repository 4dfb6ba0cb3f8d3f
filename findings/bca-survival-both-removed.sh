#!/usr/bin/env bash
# bca-survival removes both of two related measurements from its Cox model, where it says that it removes
# variables one after the other: muscle area decides survival, and the model is fitted without muscle.
#
# Packages: bca-survival 0.2.6, lifelines 0.29.0, numpy 1.26.4, pandas 2.2.3, scipy 1.10.1,
#   scikit-learn 1.5.2, statsmodels 0.14.4, seaborn 0.13.2, matplotlib 3.9.4, tqdm 4.67.1.
# Behaviour: perform_multivariate_cox_regression computes the variance inflation factors once and then removes
#   each variable above 20 before it computes them again. Two variables that are nearly the same have equal
#   factors, so that both go, though the second is no longer inflated without the first. It removes them
#   from the list of its caller, too.
# Expected: that the variable with the highest factor is removed and the others are computed again.
# Instead: leave one of each pair out by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'lifelines==0.29.0' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.10.1' \
  'scikit-learn==1.5.2' 'statsmodels==0.14.4' 'seaborn==0.13.2' 'matplotlib==3.9.4' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'bca-survival==0.2.6'
cat > expected.txt <<'EXPECTED'
factors: {'muscle area': 223.5, 'muscle index': 223.5, 'age': 1.0}
factors without the index: {'muscle area': 1.0, 'age': 1.0}
variables of the model: ['age'] concordance 0.50
without the index: ['muscle area', 'age'] concordance 0.72
the list of the caller: ['age']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy
import pandas
from bca_survival.models import calculate_vif, perform_multivariate_cox_regression

generator = numpy.random.default_rng(0)
people = 500
muscle = generator.normal(140, 20, people)
table = pandas.DataFrame({'muscle area': muscle, 'muscle index': muscle / 2.9 + generator.normal(0, 0.5, people),
                          'age': generator.normal(60, 9, people)})
table['days'] = generator.exponential(1500 * numpy.exp(0.05 * (muscle - 140)))
table['event'] = 1
names = ['muscle area', 'muscle index', 'age']
print('factors:', {row.Variable: round(row.VIF, 1) for row in calculate_vif(table, names).itertuples()})
print('factors without the index:', {row.Variable: round(row.VIF, 1) for row in calculate_vif(table, ['muscle area', 'age']).itertuples()})
with contextlib.redirect_stdout(io.StringIO()):
    model = perform_multivariate_cox_regression(table, names, penalizer=0.0)
    right = perform_multivariate_cox_regression(table, ['muscle area', 'age'], penalizer=0.0)
print('variables of the model:', list(model.params_.index), f'concordance {model.concordance_index_:.2f}')
print('without the index:', list(right.params_.index), f'concordance {right.concordance_index_:.2f}')
print('the list of the caller:', names)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

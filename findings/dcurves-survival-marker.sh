#!/usr/bin/env bash
# dcurves takes the probability to survive for the risk where it converts a marker, so a good marker
# looks harmful.
#
# Packages: dcurves 1.1.7, lifelines 0.30.3, pandas 2.3.3, numpy 2.4.6.
# Behaviour: models_to_prob names columns that are not probabilities yet. With a time to the
#   outcome, dcurves fits a Cox model to each and takes the survival at the stated time, not one
#   minus it. Those who live longest are thus treated first: the net benefit is below the one of
#   treating everybody, at all thresholds, and without censored outcomes the same option is right.
# Expected: the decision curve of the column risk below, which holds the same order as a probability
#   of death within a year.
# Why it matters here: decision curves judge whether a model may be used; a useful one is thrown
#   away.
# Instead: pass one minus the survival of your own Cox model, without models_to_prob.
# Source: Vickers et al., Extensions to decision curve analysis (2008): risk at the time of
#   interest.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dcurves==1.1.7' 'lifelines==0.30.3' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
marker, converted by dcurves: 0.145 0.031 -0.117
marker, converted by lifelines: 0.157 0.108 0.074
treat everybody: 0.150 0.044 -0.092
treat nobody: 0.000 0.000 0.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from dcurves import dca
from lifelines import CoxPHFitter

random = np.random.default_rng(0)
marker = random.normal(size=2000)
death, end = random.exponential(5 * np.exp(-marker)), random.exponential(20, size=2000)
table = pd.DataFrame({'marker': marker, 'years': np.minimum(death, end), 'died': (death <= end).astype(int)})
model = CoxPHFitter().fit(table, 'years', 'died')
table['risk'] = 1 - model.predict_survival_function(table, times=[1]).iloc[0]
curves = dca(
    table, 'died', ['marker', 'risk'], thresholds=[0.1, 0.2, 0.3], models_to_prob=['marker'], time=1,
    time_to_outcome_col='years',
)
benefit = curves.pivot(index='model', columns='threshold', values='net_benefit')
for name, words in (('marker', 'marker, converted by dcurves'), ('risk', 'marker, converted by lifelines'),
                    ('all', 'treat everybody'), ('none', 'treat nobody')):
    print(f'{words}:', *(f'{value:.3f}' for value in benefit.loc[name]))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

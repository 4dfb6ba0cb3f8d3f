#!/usr/bin/env bash
# psmpy uses the outcome of a study to match its patients, though it says that it ignores it.
#
# Packages: psmpy 0.3.16, scikit-learn 1.9.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: PsmPy has the argument target, 'outcome' by default, "will ignore in regression/matching".
#   It stores the name and uses it nowhere: the outcome is a covariate of the propensity score unless it
#   is also in exclude. Treated and untreated patients are then matched on equal outcomes, so that the
#   effect of the treatment vanishes.
# Expected: the target is left out of the covariates.
# Instead: exclude=['outcome'].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'psmpy==0.3.16' 'scikit-learn==1.9.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
effect of the treatment: 2.0
exclude=[]: covariates ['age', 'outcome'], effect in 84 pairs 0.5
exclude=['outcome']: covariates ['age'], effect in 84 pairs 1.8
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from psmpy import PsmPy

random = np.random.default_rng(0)
age = random.normal(60, 10, 600)
treated = (random.random(600) < 0.3 / (1 + np.exp(-(age - 60) / 10))).astype(int)
outcome = 2 * treated + 0.1 * (age - 60) + random.normal(size=600)
table = pd.DataFrame({'patient': range(600), 'age': age, 'treated': treated, 'outcome': outcome})
print('effect of the treatment: 2.0')
for exclude in ([], ['outcome']):
    study = PsmPy(table, treatment='treated', indx='patient', exclude=exclude, target='outcome')
    study.logistic_ps(balance=False)
    study.kdtree_matched(matcher='propensity_logit', replacement=False, caliper=None)
    pairs = study.matched_ids.dropna()
    values = table.set_index('patient')['outcome']
    effect = (values[pairs['patient']].to_numpy() - values[pairs.iloc[:, 1]].to_numpy()).mean()
    print(f'exclude={exclude}: covariates {study.xvars}, effect in {len(pairs)} pairs {effect:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

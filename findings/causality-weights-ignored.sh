#!/usr/bin/env bash
# The estimators of causality accept weights and drop them: with the weights of a sample in which a group
# is four times too rare, estimate_ATE gives the effect of the sample, 1.9, and not 3.2.
#
# Packages: causality 0.0.11, pandas 2.3.3, numpy 2.4.6, statsmodels 0.14.6, scikit-learn 1.7.2.
# Behaviour: estimate_ATE, estimate_ATC and estimate_ATT of InverseProbabilityWeightedLS take
#   additional_weight_column, and call estimate_effect with None in its place, also for the names of other
#   columns and the intercept. estimate_effect itself uses the weights.
# Expected: the same as estimate_effect(..., effect='ATE'). The effect is 1 for 80 % of the sample and 5
#   for the others, who are half of the people after they are weighted by 4: 3.
# Why it matters here: surveys are weighted since their groups differ.
# Instead: estimate_effect(..., additional_weight_column=name, effect='ATE').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'causality==0.0.11' 'pandas==2.3.3' 'numpy==2.4.6' 'statsmodels==0.14.6' 'scikit-learn==1.7.2' 'networkx==3.6.1'
cat > expected.txt <<'EXPECTED'
true effect 1.8 in the sample and 3.0 among the people
ATE: estimate_effect without weights 1.8, with weights 3.0, estimate_ATE with weights 1.8
ATC: estimate_effect without weights 1.8, with weights 3.0, estimate_ATC with weights 1.8
ATT: estimate_effect without weights 1.8, with weights 3.0, estimate_ATT with weights 1.8
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from causality.estimation.parametric import InverseProbabilityWeightedLS

random = np.random.default_rng(0)
PEOPLE = 20_000
rare = random.random(PEOPLE) < 0.2
confounder = random.normal(size=PEOPLE)
treated = random.random(PEOPLE) < 1 / (1 + np.exp(-confounder))
table = pd.DataFrame({
    'confounder': confounder,
    'treated': treated.astype(int),
    'outcome': confounder + treated * np.where(rare, 5, 1) + random.normal(size=PEOPLE),
    'weight': np.where(rare, 4.0, 1.0),
})


def estimate(method, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        low, effect, high = getattr(InverseProbabilityWeightedLS(), method)(
            table.copy(), 'treated', 'outcome', {'confounder': 'c'}, **options)
    return f'{effect:.1f}'


print('true effect 1.8 in the sample and', 0.5 * 1 + 0.5 * 5, 'among the people')
for name in ('ATE', 'ATC', 'ATT'):
    print(f'{name}: estimate_effect without weights {estimate("estimate_effect", effect=name)}, with weights '
          f'{estimate("estimate_effect", effect=name, additional_weight_column="weight")}, estimate_{name} '
          f'with weights {estimate("estimate_" + name, additional_weight_column="weight")}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

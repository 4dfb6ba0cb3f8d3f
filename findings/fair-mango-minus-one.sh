#!/usr/bin/env bash
# fair-mango takes labels of -1 and 1 for 0 and 1, whatever positive_target says.
#
# Packages: fair-mango 0.2.2, pandas 3.1.1, scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: a target is encoded as 0 and 1 only where both of its two values, sorted, differ from
#   0 and 1. Of -1 and 1 the second is equal, and so is the first of 0 and 2, and nothing is
#   encoded. The selection rate is then the mean of -1 and 1, and the confusion matrix leaves each
#   -1 out.
# Expected: the share of people with the positive target, which the argument positive_target names.
# Why it matters here: -1 and 1 are the labels of support vector machines and of many data sets.
# Instead: turn both columns into 0 and 1 first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'scikit-learn==1.9.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fair-mango==0.2.2'
cat > expected.txt <<'EXPECTED'
labels 0 and 1: selection rate of women 0.30, true_positive_rate 0.79, false_positive_rate 0.21
labels no and yes: selection rate of women 0.30, true_positive_rate 0.79, false_positive_rate 0.21
labels -1 and 1: selection rate of women -0.40, true_positive_rate 1.00, false_positive_rate nan
labels 0 and 2: selection rate of women 0.60, true_positive_rate nan, false_positive_rate 0.00
by hand: 0.30, 0.79, 0.21
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import warnings

import numpy as np
import pandas as pd
from fair_mango.dataset.dataset import Dataset
from fair_mango.metrics.metrics import ConfusionMatrix, SelectionRate

warnings.simplefilter('ignore')
random = np.random.default_rng(0)
sex = random.choice(['f', 'm'], 2000)
ill = random.random(2000) < np.where(sex == 'f', 0.3, 0.5)
found = np.where(random.random(2000) < 0.8, ill, ~ill)
for label, values in (('labels 0 and 1', (0, 1)), ('labels no and yes', ('no', 'yes')), ('labels -1 and 1', (-1, 1)), ('labels 0 and 2', (0, 2))):
    table = pd.DataFrame({'sex': sex, 'ill': np.where(ill, values[1], values[0]), 'found': np.where(found, values[1], values[0])})
    data = Dataset(table, ['sex'], 'ill', 'found', positive_target=values[1])
    rates = {tuple(part.sensitive_group)[0]: part.data for part in SelectionRate(data)()}
    try:
        errors = {tuple(part.sensitive_group)[0]: part.data for part in ConfusionMatrix(data)()}
        seen = ', '.join(f'{name} {errors["f"][name][0]:.2f}' for name in ('true_positive_rate', 'false_positive_rate'))
    except ValueError as error:
        seen = f'ValueError {error}'
    print(f'{label}: selection rate of women {rates["f"]:.2f}, {seen}')
women = sex == 'f'
print(f'by hand: {ill[women].mean():.2f}, {found[women & ill].mean():.2f}, {found[women & ~ill].mean():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

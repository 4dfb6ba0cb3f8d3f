#!/usr/bin/env bash
# The fair predictions of equipy are multiplied by the share of the group where the people of one
# group, or one person, are predicted by themselves.
#
# Packages: equipy 0.0.11a0.dev0, statsmodels 0.14.6, scikit-learn 1.9.1, scipy 1.17.1, pandas
#   3.1.1, numpy 2.4.6, matplotlib 3.11.2, seaborn 0.13.2.
# Behaviour: the fair value is the mean of the quantiles of all groups, weighted by their shares in
#   the calibration data. transform sums over the groups that occur in the data that it is given
#   and does not divide by their weights. Without men, 70 % of the weight is missing.
# Expected: the same value for the same person, whoever else is in the table, as fit has stored the
#   quantiles of all groups.
# Why it matters here: people are scored one at a time once a model is used.
# Instead: add one person of each group to the table, and drop them from the result.
# Source: Charpentier, Hu and Ratz, Mitigating Discrimination in Insurance with Wasserstein
#   Barycenters, 2023.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statsmodels==0.14.6' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'pandas==3.1.1' 'numpy==2.4.6' 'matplotlib==3.11.2' 'seaborn==0.13.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'equipy==0.0.11a0.dev0'
cat > expected.txt <<'EXPECTED'
FairWasserstein, f: mean 53.9 in the table of all, 12.0 in a table of their own
FairWasserstein, m: mean 54.0 in the table of all, 42.0 in a table of their own
MultiWasserstein, f: mean 53.9 in the table of all, 12.0 in a table of their own
MultiWasserstein, m: mean 54.0 in the table of all, 42.0 in a table of their own
mean of the quantiles of both groups by hand: 54.2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from equipy.fairness import FairWasserstein, MultiWasserstein

random = np.random.default_rng(0)
sex = random.choice(['f', 'm'], 4000, p=[0.3, 0.7])
salary = np.where(sex == 'f', random.normal(40, 5, 4000), random.normal(60, 5, 4000))
table = pd.DataFrame({'sex': sex})
past, new, people = slice(0, 2000), slice(2000, None), table[2000:].reset_index(drop=True)
for kind in (FairWasserstein, MultiWasserstein):
    fair = kind()
    fair.fit(salary[past], table[past])
    together = fair.transform(salary[new], people)
    for name in ('f', 'm'):
        rows = (people['sex'] == name).to_numpy()
        alone = fair.transform(salary[new][rows], people[rows].reset_index(drop=True))
        print(f'{kind.__name__}, {name}: mean {together[rows].mean():.1f} in the table of all, {alone.mean():.1f} in a table of their own')
first, second = np.sort(salary[past][sex[past] == 'f']), np.sort(salary[past][sex[past] == 'm'])
weight = np.mean(sex[past] == 'f')
print(f'mean of the quantiles of both groups by hand: {weight * first.mean() + (1 - weight) * second.mean():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

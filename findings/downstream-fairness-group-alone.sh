#!/usr/bin/env bash
# downstream-fairness numbers the groups of the table that it is given, so that people of the
# second group alone get the adjustments of the first.
#
# Packages: downstream-fairness 0.1.1, POT 0.9.4, scipy 1.11.4, pandas 2.2.3, numpy 1.26.4.
# Behaviour: get_adjusted_scores looks the column of a group up by its place in the sorted groups
#   of the data, not of the training data whose table it gets. Where only group b is present, it
#   has the place of group a, and its scores move away from the common distribution.
# Expected: the same adjusted score for the same person, whoever else is in the table. The columns
#   of the adjustments carry the names of the groups.
# Why it matters here: people are scored one at a time or clinic by clinic once a model is used;
#   the harm is largest for the group that the adjustment should help.
# Instead: add one person of each group to the table, and drop them from the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'POT==0.9.4' 'scipy==1.11.4' 'pandas==2.2.3' 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'downstream-fairness==0.1.1'
cat > expected.txt <<'EXPECTED'
group a: mean score 0.71, adjusted in the table of all 0.30, in a table of their own 0.30; by the column repaired_scores_a 0.30
group b: mean score 0.29, adjusted in the table of all 0.30, in a table of their own 0.04; by the column repaired_scores_b 0.30
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from downstream_fairness.process import get_adjusted_scores
from downstream_fairness.train import get_adjustment_table

random = np.random.default_rng(0)
group = random.choice(['a', 'b'], 2000)
people = pd.DataFrame({'group': group, 'score': np.where(group == 'a', random.beta(5, 2, 2000), random.beta(2, 5, 2000)).round(2)})
with contextlib.redirect_stdout(io.StringIO()):
    table = get_adjustment_table(people, 'group', 'score')
together = get_adjusted_scores(table, people, 'group', 'score')
for name in 'ab':
    rows = people['group'] == name
    alone = get_adjusted_scores(table, people[rows], 'group', 'score')
    named = people.loc[rows, 'score'].map(dict(zip(table['pred_orig'].round(2), table[f'repaired_scores_{name}'])))
    print(f'group {name}: mean score {people.loc[rows, "score"].mean():.2f}, adjusted in the table of all {together[rows].mean():.2f}, '
          f'in a table of their own {alone.mean():.2f}; by the column repaired_scores_{name} {named.mean():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

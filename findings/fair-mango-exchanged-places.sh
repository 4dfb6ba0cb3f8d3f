#!/usr/bin/env bash
# After the groups of fair-mango are listed once, it gives people of one group the data of another
# where two columns have the same values.
#
# Packages: fair-mango 0.2.2, pandas 3.1.1, scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: get_data_for_one_group and get_real_target_for_one_group look a group up by the set of
#   its values, which forgets their order, and keep the last one that fits. Before the groups are
#   listed, the order counts.
# Expected: what the documentation says, "The order of the values matters and exchanging the places
#   will not work!"
# Why it matters here: country of birth and of residence, diagnosis at admission and at discharge,
#   and answers of two questions have the same values.
# Instead: select the rows of the table by its columns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'scikit-learn==1.9.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fair-mango==0.2.2'
cat > expected.txt <<'EXPECTED'
before a list of all groups, born in Chile, lives in Peru: 5 people, 3 ill; by the columns 5 people, 3 ill
before a list of all groups, born in Peru, lives in Chile: 3 people, 1 ill; by the columns 3 people, 1 ill
before a list of all groups, born in Chile, lives in Chile: 7 people, 1 ill; by the columns 7 people, 1 ill
before a list of all groups, born in Peru, lives in Peru: 2 people, 1 ill; by the columns 2 people, 1 ill
after a list of all groups, born in Chile, lives in Peru: 3 people, 1 ill; by the columns 5 people, 3 ill
after a list of all groups, born in Peru, lives in Chile: 3 people, 1 ill; by the columns 3 people, 1 ill
after a list of all groups, born in Chile, lives in Chile: 7 people, 1 ill; by the columns 7 people, 1 ill
after a list of all groups, born in Peru, lives in Peru: 2 people, 1 ill; by the columns 2 people, 1 ill
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from fair_mango.dataset.dataset import Dataset

people = pd.DataFrame({'born': ['Chile'] * 5 + ['Peru'] * 3 + ['Chile'] * 7 + ['Peru'] * 2,
                       'lives': ['Peru'] * 5 + ['Chile'] * 3 + ['Chile'] * 7 + ['Peru'] * 2})
people['ill'] = [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0]
data = Dataset(people, ['born', 'lives'], 'ill')
groups = (('Chile', 'Peru'), ('Peru', 'Chile'), ('Chile', 'Chile'), ('Peru', 'Peru'))
for moment in ('before', 'after'):
    for born, lives in groups:
        rows, target = data.get_data_for_one_group((born, lives)), data.get_real_target_for_one_group((born, lives))
        right = people.query('born == @born and lives == @lives')
        print(f'{moment} a list of all groups, born in {born}, lives in {lives}: {len(rows)} people, {int(target.sum())} ill; '
              f'by the columns {len(right)} people, {right["ill"].sum()} ill')
    data.get_data_for_all_groups()
    data.get_real_target_for_all_groups()
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

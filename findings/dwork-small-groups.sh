#!/usr/bin/env bash
# dwork documents a smallest group of 10 for its groups, and returns groups of one person.
#
# Packages: dwork 0.0.13, pandas 3.1.1, numpy 2.4.6.
# Behaviour: a grouped dataset takes a treshold, 10 by default, and an ε for the noisy count that is
#   compared with it; the documents warn against small values, since the name of a group reveals
#   that somebody has this value. Both arguments are accepted and not used: every value of the
#   column becomes a group, the only patient with a rare disease too, and no budget is spent on the
#   choice.
# Expected: groups whose noisy count reaches the threshold.
# Instead: name the groups yourself, from a public list, and filter by each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dwork==0.0.13'
cat > expected.txt <<'EXPECTED'
documented: The minimum number of rows/datapoints that a formed group must have in order to qualify for inclusion
{} groups: ['asthma', 'kuru']
{'treshold': 10, 'epsilon': 0.3} groups: ['asthma', 'kuru']
{'treshold': 1000} groups: ['asthma', 'kuru']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from dwork.dataschema import DataSchema
from dwork.dataset.pandas import GroupedPandasDataset, PandasDataset
from dwork.language.types import Integer


class Patients(DataSchema):
    age = Integer(min=0, max=100)


words = ' '.join(GroupedPandasDataset.__doc__.split())
print('documented:', words[words.index('The minimum number'):].split('. The treshold')[0])
table = pd.DataFrame({'age': 50, 'diagnosis': ['asthma'] * 40 + ['kuru']})
for arguments in ({}, {'treshold': 10, 'epsilon': 0.3}, {'treshold': 1000}):
    try:
        groups = PandasDataset(Patients, table).group_by(by='diagnosis', **arguments)
    except TypeError as error:
        print(arguments, error)
        continue
    print(arguments, 'groups:', list(groups.groups))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# anonypyx releases groups that are less close than t where a diagnosis does not occur in a group.
#
# Packages: anonypyx 0.2.11, pandas 2.3.3, numpy 2.4.6, scipy 1.17.1.
# Behaviour: with t=0.2 no share of a diagnosis in a group may differ from its share in the table by
#   more than 0.2. The shares are compared for the values that occur in the group, so a diagnosis
#   that is not there does not count, whose difference is the largest. In a column of pandas'
#   category dtype all values occur, and it works.
# Expected: the groups of the category column for both. That a group does not have a disease is what
#   t-closeness is to hide.
# Why it matters here: the privacy parameter of the release is 0.375, not 0.2.
# Instead: astype('category') for the sensitive column.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'anonypyx==0.2.11' 'pandas==2.3.3' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
J45 in the whole table: 0.375; demanded: no difference of a share above 0.2
object: age 20 J45 0.000; age 40 J45 0.500; age 60 J45 0.500; age 80 J45 0.500 largest difference 0.375
category: age 20-40 J45 0.250; age 60 J45 0.500; age 80 J45 0.500 largest difference 0.125
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import anonypyx
import pandas as pd

others = [f'D{number}' for number in range(10)]
people = [(20, code) for code in 2 * others]  # nobody of 20 has J45; half of all others have
people += [(age, code) for age in (40, 60, 80) for code in others + 10 * ['J45']]
table = pd.DataFrame(people, columns=['age', 'diagnosis'])
share = (table['diagnosis'] == 'J45').mean()
print(f'J45 in the whole table: {share:.3f}; demanded: no difference of a share above 0.2')
for kind in ('object', 'category'):
    made = anonypyx.Anonymiser(
        table.astype({'diagnosis': kind}), k=5, t=0.2, feature_columns=['age'], sensitive_column='diagnosis',
        generalisation_strategy='human-readable').anonymise()
    shares = [(age, group.loc[group['diagnosis'] == 'J45', 'count'].sum() / group['count'].sum())
              for age, group in made.groupby('age', sort=True)]
    print(f'{kind}:', '; '.join(f'age {age} J45 {part:.3f}' for age, part in shares),
          f'largest difference {max(abs(part - share) for _, part in shares):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# aindo-anonymize gives people the values of others where the rows of a table were filtered or
# sorted.
#
# Packages: aindo-anonymize 1.1.5, pandas 2.3.3, numpy 2.4.6, scikit-learn 1.9.1.
# Behaviour: key hashing and both perturbations return a column with a new index 0, 1, 2, …; the
#   pipeline puts it into the table by its index. The rows of a filtered, sorted or sampled table
#   have other labels, so each gets the value of the person with that number, or none. The other
#   columns stay. The hash that hash_name asks for is not used, either: it is always SHA-256.
# Expected: each row keeps its own values, changed.
# Why it matters here: pseudonyms are what tables of one person are joined by, and the unit of a
#   guarantee: records of several people become one person's, without a message.
# Instead: table.reset_index(drop=True) first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aindo-anonymize==1.1.5' 'pandas==2.3.3' 'numpy==2.4.6' 'scikit-learn==1.9.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
all: 30 Ann 50 a, 41 Ben 60 a, 52 Cleo 70 b, 63 Dan 80 b, 74 Eve 90 c, 85 Finn 100 c
from 50 years on: 52 Eve 90 c, 63 Finn 100 c, 74 None nan nan, 85 None nan nan
the oldest first: 85 Ann 50 a, 74 Ben 60 a, 63 Cleo 70 b, 52 Dan 80 b, 41 Eve 90 c, 30 Finn 100 c
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from aindo.anonymize import AnonymizationPipeline, Config

people = pd.DataFrame({'name': ['Ann', 'Ben', 'Cleo', 'Dan', 'Eve', 'Finn'], 'age': [30, 41, 52, 63, 74, 85],
                       'weight': [50.0, 60, 70, 80, 90, 100], 'ward': ['a', 'a', 'b', 'b', 'c', 'c']})
steps = [{'method': {'type': 'identity'}, 'columns': ['age']},
         {'method': {'type': 'key_hashing', 'key': 'k'}, 'columns': ['name']},
         {'method': {'type': 'perturbation_numerical', 'alpha': 1e-9, 'seed': 0}, 'columns': ['weight']},
         {'method': {'type': 'perturbation_categorical', 'alpha': 0.0, 'seed': 0}, 'columns': ['ward']}]
pipeline = AnonymizationPipeline(Config.from_dict({'steps': steps}))
whole = pipeline.run(people)
names = dict(zip(whole['name'], people['name']))
for title, table in {'all': people, 'from 50 years on': people[people['age'] >= 50],
                     'the oldest first': people.sort_values('age', ascending=False)}.items():
    made = pipeline.run(table)
    print(f'{title}:', ', '.join(
        f'{age} {names.get(name)} {weight:.0f} {ward}'
        for age, name, weight, ward in made[['age', 'name', 'weight', 'ward']].itertuples(index=False)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

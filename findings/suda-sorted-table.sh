#!/usr/bin/env bash
# suda gives its scores to other rows where the table was sorted or filtered, and mixes the values of two people
# in one row.
#
# Packages: suda 0.2.2, pandas 2.2.3, numpy 1.26.4.
# Behaviour: the scores are merged by position, which gives them the labels 0, 1, 2, …, and are then put together
#   with the table by its own labels. After sort_values, the person with a unique disease has no score, and
#   another one has it; for each column the larger of the two values is returned.
# Expected: the score of each person in their row, whatever the labels are.
# Why it matters here: the people at risk are left in the table and others are removed.
# Instead: reset_index(drop=True) before.
# Source: the description of suda: the table that it returns has the rows of the one that it was given.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'suda==0.2.2' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
as it is
  person 0: sex 1, disease 1, age 80; returned sex 1.0, disease 1.0, age 80.0, score 0.0
  person 1: sex 1, disease 1, age 30; returned sex 1.0, disease 1.0, age 30.0, score 0.0
  person 2: sex 2, disease 1, age 50; returned sex 2.0, disease 1.0, age 50.0, score 0.0
  person 3: sex 2, disease 1, age 40; returned sex 2.0, disease 1.0, age 40.0, score 0.0
  person 4: sex 1, disease 9, age 20; returned sex 1.0, disease 9.0, age 20.0, score 1.0
  person 5: sex 2, disease 1, age 60; returned sex 2.0, disease 1.0, age 60.0, score 0.0
sorted by age
  person 4: sex 1, disease 9, age 20; returned sex 2.0, disease 9.0, age 60.0, score 0.0
  person 1: sex 1, disease 1, age 30; returned sex 1.0, disease 1.0, age 30.0, score 0.0
  person 3: sex 2, disease 1, age 40; returned sex 2.0, disease 1.0, age 50.0, score 0.0
  person 2: sex 2, disease 1, age 50; returned sex 2.0, disease 1.0, age 50.0, score 0.0
  person 5: sex 2, disease 1, age 60; returned sex 2.0, disease 1.0, age 80.0, score 0.0
  person 0: sex 1, disease 1, age 80; returned sex 1.0, disease 9.0, age 80.0, score 1.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from suda import suda

people = pd.DataFrame({
    'sex': [1, 1, 2, 2, 1, 2],
    'disease': [1, 1, 1, 1, 9, 1],
    'age': [80, 30, 50, 40, 20, 60],
})


def show(title, table):
    found = suda(table.copy(), max_msu=1, columns=['sex', 'disease'])
    print(title)
    for label in table.index:
        before, after = table.loc[label], found.loc[label]
        print(f"  person {label}: sex {before['sex']}, disease {before['disease']}, age {before['age']}; returned sex "
              f"{after['sex']}, disease {after['disease']}, age {after['age']}, score {after['suda']}")


show('as it is', people)
show('sorted by age', people.sort_values('age'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

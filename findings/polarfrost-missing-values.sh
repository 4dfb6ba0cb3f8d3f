#!/usr/bin/env bash
# polarfrost drops the people who have a missing quasi-identifier where it divides by that column, and
# keeps them where it does not.
#
# Packages: polarfrost 0.2.1, polars 1.30.0, pandas 2.3.3, numpy 2.4.6. Its import needs pyspark, which
#   this function does not use; an empty module stands in for it.
# Behaviour: mondrian_k_anonymity divides into "at most the median" and "above", or into two sets of
#   values. A missing value is in neither, and its row is in no group and no count of the result, with
#   no message. A column that is not divided keeps its missing values, and its range does not show them.
# Expected: a group for them, or an error.
# Why it matters here: the counts describe fewer people; those without a recorded age are not random.
# Instead: fill missing values with a value of their own before, and add up the column count.
# Source: LeFevre, DeWitt and Ramakrishnan (2006): the partitions cover all records.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polarfrost==0.2.1' 'polars==1.30.0' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
1000 people, 0 without age: in the result 1000
1000 people, 0 without ward: in the result 1000
1000 people, 100 without age: in the result 900
1000 people, 100 without ward: in the result 900
1000 people, 300 without age: in the result 700
1000 people, 300 without ward: in the result 700
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from unittest.mock import MagicMock

import numpy as np
import polars as pl

for name in ('pyspark', 'pyspark.sql', 'pyspark.sql.functions'):
    sys.modules[name] = MagicMock()
from polarfrost.mondrian import mondrian_k_anonymity_polars

random = np.random.default_rng(0)
ages = random.integers(20, 90, 1000).tolist()
wards = random.choice(['a', 'b', 'c', 'd'], 1000).tolist()
for missing in (0, 100, 300):
    for column in ('age', 'ward'):
        people = pl.DataFrame({
            'age': [None] * missing + ages[missing:] if column == 'age' else ages,
            'ward': [None] * missing + wards[missing:] if column == 'ward' else wards,
            'diagnosis': ['asthma', 'flu'] * 500,
        })
        result = mondrian_k_anonymity_polars(
            people, ['age', 'ward'] if column == 'age' else ['ward'], 'diagnosis', 10, ['ward']
        )
        print(f'1000 people, {missing} without {column}: in the result {result["count"].sum()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# polarfrost leaves the exact ages and postcodes in groups that are smaller than k, which it says it
# masks.
#
# Packages: polarfrost 0.2.1, polars 1.30.0, pandas 2.3.3. Its import needs pyspark, which
#   this function does not use; an empty module stands in for it.
# Behaviour: mondrian_k_anonymity_alt replaces the quasi-identifiers of a group below k only if they
#   are named as categorical, and the sensitive column. Numbers stay as they were, while larger groups
#   get ranges: the people that were to be hidden are the ones shown exactly. A whole table below k
#   comes back with its numbers.
# Expected: masked values, as for text; "Value to use for masking small groups" is a parameter, and a
#   comment of the source says that all quasi-identifiers are masked.
# Why it matters here: with the ward as a group, the patients of small wards can be looked up.
# Instead: remove the groups below k before.
# Source: the documentation of the function and its name: k is the "minimum group size".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polarfrost==0.2.1' 'polars==1.30.0' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
north, 6 people, k = 5: [('[34-60]', '[10115-10243]', 'masked', 'asthma'), ('[34-60]', '[10115-10243]', 'masked', 'flu')]
south, 2 people, k = 5: [(29, 80331, 'masked', 'masked'), (83, 80333, 'masked', 'masked')]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from unittest.mock import MagicMock

import polars as pl

for name in ('pyspark', 'pyspark.sql', 'pyspark.sql.functions'):
    sys.modules[name] = MagicMock()
from polarfrost.mondrian import mondrian_k_anonymity_alt

people = pl.DataFrame({
    'ward': ['north'] * 6 + ['south'] * 2,
    'age': [34, 41, 52, 47, 38, 60, 29, 83],
    'postcode': [10115, 10117, 10119, 10178, 10179, 10243, 80331, 80333],
    'sex': list('fmfmfmfm'),
    'diagnosis': ['asthma', 'flu'] * 4,
})
for ward in ('north', 'south'):
    part = people.filter(pl.col('ward') == ward).drop('ward')
    shown = mondrian_k_anonymity_alt(
        part.lazy(), ['age', 'postcode', 'sex'], 'diagnosis', k=5, categorical=['sex']
    ).collect()
    print(f'{ward}, {len(part)} people, k = 5:', sorted(set(shown.rows())))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# hierarchical-bay-cat-encoder drops requested columns by the letters of their names.
#
# Packages: hierarchical-bay-cat-encoder 0.4.5, numpy 2.2.6, pandas 2.3.3, scikit-learn 1.7.2.
# Behaviour: drop_intermediate=True removes the codes of the upper levels, which were needed to
#   compute the requested ones. Whether a column was requested is looked up after str.strip('_code')
#   of its name, which removes any of the letters c, o, d, e and the underscore from both ends, and
#   not the ending _code: city_code becomes ity, which nobody asked for. The column is gone from the
#   result, without a message, and a model is trained without it.
# Expected: all requested codes, as with drop_intermediate=False.
# Instead: drop_intermediate=False, and drop columns by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hierarchical-bay-cat-encoder==0.4.5'
cat > expected.txt <<'EXPECTED'
asked for ['region', 'ward'], drop_intermediate=False: ['region_code', 'ward_code']
asked for ['region', 'ward'], drop_intermediate=True: ['region_code']
asked for ['city', 'income'], drop_intermediate=False: ['city_code', 'income_code']
asked for ['city', 'income'], drop_intermediate=True: []
asked for ['region', 'diagnosed'], drop_intermediate=False: ['region_code', 'diagnosed_code']
asked for ['region', 'diagnosed'], drop_intermediate=True: ['region_code']
asked for ['region', 'region.city'], drop_intermediate=False: ['region_code', 'region.city_code']
asked for ['region', 'region.city'], drop_intermediate=True: ['region_code', 'region.city_code']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from BayCatEncoder.code import BayCatEncoder

draw = np.random.RandomState(0)
for names in (['region', 'ward'], ['city', 'income'], ['region', 'diagnosed'], ['region', 'region.city']):
    columns = sorted({part for name in names for part in name.split('.')})
    table = pd.DataFrame({column: draw.choice(['a', 'b', 'c'], size=200) for column in columns})
    target = pd.Series(draw.randint(2, size=200), name='target')
    for drop in (False, True):
        with contextlib.redirect_stdout(io.StringIO()):
            encoder = BayCatEncoder(names, CV=False, drop_intermediate=drop, verbosity=False).fit(table, target)
            result = encoder.transform(table.copy())
        codes = [column for column in result if column.endswith('_code')]
        print(f'asked for {names}, drop_intermediate={drop}: {codes}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

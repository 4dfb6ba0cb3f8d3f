#!/usr/bin/env bash
# stata-codebook finds no missing value in a column that has numbers and texts.
#
# Packages: stata-codebook 0.2.0, pandas 2.3.3, scipy 1.16.2, numpy 2.3.3.
# Behaviour: a column of mixed types is turned into text before its missing values are counted.
#   They become the words "nan" and "None": none is missing, they count as values, and are in the
#   list of the most frequent categories.
# Expected: the missing values of the column, as for the same column without the one text.
# Why it matters here: a result that is typed in as "<5" among numbers is what makes a column
#   mixed.
# Instead: column.isna().sum(), or turn the values that are present into text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'scipy==1.16.2' 'stata-codebook==0.2.0'
cat > expected.txt <<'EXPECTED'
numbers: missing 3 of 6, right 3, different values 3, top -
with a text: missing 0 of 6, right 3, different values 5, top {'nan': np.int64(2), '7.5': np.int64(1), '<5': np.int64(1), 'None': np.int64(1), '9.0': np.int64(1)}
texts: missing 3 of 6, right 3, different values 3, top {'7.5': np.int64(1), '<5': np.int64(1), '9.0': np.int64(1)}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from stata_codebook.codebook import codebook

for label, values in (('numbers', [7.5, 8.0, np.nan, np.nan, None, 9.0]), ('with a text', [7.5, '<5', np.nan, np.nan, None, 9.0]),
                      ('texts', ['7.5', '<5', np.nan, np.nan, None, '9.0'])):
    shown = codebook(pd.DataFrame({'crp': pd.Series(values)}), 'crp').iloc[0]
    print(f"{label}: missing {shown['Missing values']} of {len(values)}, right {pd.isna(values).sum()}, "
          f"different values {shown['Unique values']}, top {shown['Top categories']}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

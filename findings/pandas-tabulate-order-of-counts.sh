#!/usr/bin/env bash
# The frequency table of pandas-tabulate is sorted by counts, and its cumulative percentages with
# it.
#
# Packages: pandas-tabulate 0.1.0, pandas 2.3.3, scipy 1.16.2, numpy 2.3.3.
# Behaviour: sort_values, documented as "Sort output by variable values", sorts by frequency, and
#   the values are in the order of the data where it is off. The cumulative percentage of a grade
#   is the one of all more frequent grades: 85 % of the patients have a pain of "up to 3" where 30
#   % have.
# Expected: the values in their order and the share of people with this value or a lower one, as in
#   Stata's tabulate, which it is documented to be equivalent to.
# Instead: series.value_counts(normalize=True).sort_index().cumsum().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'scipy==1.16.2' 'pandas-tabulate==0.1.0'
cat > expected.txt <<'EXPECTED'
sort_values True {5: 40.0, 4: 70.0, 3: 85.0, 1: 95.0, 2: 100.0}
sort_values False {1: 10.0, 2: 15.0, 3: 30.0, 4: 60.0, 5: 100.0}
mixed rows, sort_values False {3: 15.0, 5: 55.0, 1: 65.0, 4: 95.0, 2: 100.0}
share with this grade or less {1: 10.0, 2: 15.0, 3: 30.0, 4: 60.0, 5: 100.0}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pandas_tabulate import tabulate

pain = pd.Series([1] * 10 + [2] * 5 + [3] * 15 + [4] * 30 + [5] * 40)
for sort_values in (True, False):
    shown = tabulate(pain, percent=True, cumulative=True, sort_values=sort_values).data
    print('sort_values', sort_values, shown['cumulative_pct'].to_dict())
mixed = pain.sample(frac=1, random_state=0)
print('mixed rows, sort_values False', tabulate(mixed, cumulative=True, sort_values=False).data['cumulative_pct'].to_dict())
print('share with this grade or less', (pain.value_counts(normalize=True).sort_index().cumsum() * 100).round(2).to_dict())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The k-anonymity of umbra-k makes groups smaller than k of a table whose index has a label twice, as
# pandas.concat makes it.
#
# Packages: umbra-k 0.1.0, pandas 2.3.3, numpy 2.4.6, scikit-learn 1.9.0.
# Behaviour: the ranges of each group are written by index label. In a table of two hospitals that
#   were put together by pandas.concat, each label belongs to one row of each, and the group that is
#   written last overwrites a part of the other. With k = 5, a fifth of the people end in groups of 2
#   to 4, without a message; the package's own metric, the mean group size over k, does not show it.
# Expected: groups of at least 5, as for the same rows with their own index.
# Why it matters here: concat keeps the labels of its tables unless it is told otherwise.
# Instead: reset_index(drop=True) first, and count the groups afterwards.
# Source: the class's documentation, "Each equivalence class will contain at least k records."
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'umbra-k==0.1.0' 'pandas==2.3.3' 'numpy==2.4.6' 'scikit-learn==1.9.0'
cat > expected.txt <<'EXPECTED'
repeated index: smallest group 2, people in groups below 5: 42, metric 1.33
own index: smallest group 6, people in groups below 5: 0, metric 1.25
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from umbra_k import MondrianAnonymizer
from umbra_k.metrics import calculate_avg_equivalence_class_size

random = np.random.default_rng(0)
columns = ['age', 'postcode']
hospitals = [
    pd.DataFrame({'age': random.integers(20, 90, 100), 'postcode': random.integers(10, 99, 100)})
    for _ in range(2)
]
people = pd.concat(hospitals)
for name, table in (('repeated', people), ('own', people.reset_index(drop=True))):
    result = MondrianAnonymizer(k=5, quasi_id=columns).fit_transform(table)
    group = result.groupby(columns).age.transform('size')
    print(f'{name} index: smallest group {group.min()}, people in groups below 5: {(group < 5).sum()},',
          f'metric {calculate_avg_equivalence_class_size(result, 5, columns):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# A disease of 1 % that is coded as 0 and 1 is one of 50 % in the synthetic table of boot-dummy.
#
# Packages: boot-dummy 0.3.2, pandas 2.3.3, numpy 2.4.6.
# Behaviour: a column of numbers with fewer than ten different values is drawn from these values
#   with equal chances, and their frequencies are not looked at. The same column as text keeps its
#   shares.
# Expected: the shares of the table, as for text: "synthetic data with realistic statistical
#   properties".
# Why it matters here: zeros and ones, grades and numbers of children are numbers with few values.
# Instead: turn such columns into text before, and back afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'boot-dummy==0.3.2' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
people: ill 1.1%, ill as text 1.1%, without children 60%, with three 5%
synthetic people: ill 50.6%, ill as text 0.9%, without children 26%, with three 25%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from boot_dummy import GenerateData

random = np.random.default_rng(0)
ill = (random.random(3000) < 0.01).astype(int)
people = pd.DataFrame({'age': random.integers(20, 90, 3000), 'ill': ill, 'ill as text': np.where(ill == 1, 'yes', 'no'),
                       'children': random.choice(4, 3000, p=[0.6, 0.2, 0.15, 0.05])})
np.random.seed(0)
made = GenerateData(people).generate_dataframe(3000)
for label, table in (('people', people), ('synthetic people', made)):
    print(f"{label}: ill {table['ill'].mean():.1%}, ill as text {(table['ill as text'] == 'yes').mean():.1%}, "
          f"without children {(table['children'] == 0).mean():.0%}, with three {(table['children'] == 3).mean():.0%}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The disclosure score of suda is 0 for everybody, also for people who are unique in the table.
#
# Packages: suda 0.2.2, pandas 2.2.3, numpy 1.26.4.
# Behaviour: suda distributes a risk of the whole file (dis, 0.1 by default) over the rows in proportion to
#   their scores. It does so where the column suda of the table that it was given is above 0, a column which
#   it has set to 0 itself a few lines before.
# Expected: dis times the score divided by the sum of the scores, as its description says and shows with an
#   example of 0.021 and 0.028.
# Why it matters here: a table is released when no row has a risk.
# Instead: compute it from the column suda, as below.
# Source: Elliot and others (2005), "SUDA: a program for detecting special uniques", Joint UNECE/Eurostat work
#   session on statistical data confidentiality; the description of suda, column dis-suda.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'suda==0.2.2' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
row 0: score 0, disclosure score of suda 0.000, by hand 0.000
row 1: score 0, disclosure score of suda 0.000, by hand 0.000
row 2: score 14, disclosure score of suda 0.000, by hand 0.047
row 3: score 0, disclosure score of suda 0.000, by hand 0.000
row 4: score 16, disclosure score of suda 0.000, by hand 0.053
row 5: score 0, disclosure score of suda 0.000, by hand 0.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from suda import suda

people = pd.DataFrame({
    'sex': ['f', 'f', 'f', 'm', 'f', 'm'],
    'region': ['town', 'town', 'town', 'town', 'village', 'town'],
    'school': ['short', 'short', 'none', 'long', 'long', 'long'],
    'work': ['yes', 'yes', 'no', 'yes', 'no', 'yes'],
})
found = suda(people.copy(), max_msu=2, dis=0.1)
right = 0.1 * found['suda'] / found['suda'].sum()
for row in range(len(people)):
    print(f"row {row}: score {found['suda'][row]}, disclosure score of suda {found['dis-suda'][row]:.3f}, "
          f'by hand {right[row]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pyegen's pc, Stata's percentage of the total, is a rank.
#
# Packages: pyegen 0.2.4, pandas 2.3.3, numpy 2.3.3.
# Behaviour: pc returns the percentile rank. Four wards with 10, 20, 30 and 940 patients have 25,
#   50, 75 and 100 percent, which are 250 together, and any other numbers in this order have the
#   same.
# Expected: 1, 2, 3 and 94 percent. Its documentation says "Equivalent to Stata's: egen newvar =
#   pc(var) [, by(group)]"; Stata's manual: "returns exp scaled to be a percentage of the total,
#   between 0 and 100".
# Instead: 100 * values / values.sum(), with groupby(group).transform('sum') for groups.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'pyegen==0.2.4'
cat > expected.txt <<'EXPECTED'
[10, 20, 30, 940] pyegen [25.0, 50.0, 75.0, 100.0] of the total [1.0, 2.0, 3.0, 94.0]
[900, 910, 920, 930] pyegen [25.0, 50.0, 75.0, 100.0] of the total [24.6, 24.9, 25.1, 25.4]
by hospital [50.0, 100.0, 75.0, 75.0] of the total [10.0, 90.0, 50.0, 50.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyegen

for patients in ([10, 20, 30, 940], [900, 910, 920, 930]):
    wards = pd.Series(patients)
    right = 100 * wards / wards.sum()
    print(patients, 'pyegen', pyegen.pc(wards).tolist(), 'of the total', [round(share, 1) for share in right])
wards = pd.DataFrame({'hospital': ['A', 'A', 'B', 'B'], 'patients': [10, 90, 500, 500]})
shares = pyegen.pc(wards['patients'], by=wards['hospital'])
right = 100 * wards['patients'] / wards.groupby('hospital')['patients'].transform('sum')
print('by hospital', shares.tolist(), 'of the total', right.tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# stata-codebook computes confidence intervals from rounded means and standard deviations.
#
# Packages: stata-codebook 0.2.0, pandas 2.3.3, scipy 1.16.2, numpy 2.3.3.
# Behaviour: the mean and the standard deviation are rounded to the decimals of the output first,
#   and the interval is computed from them. With whole numbers, or values that are small beside the
#   decimals, it has the wrong place and width, or none: potassium with a mean of 4.48 has an
#   interval from 4 to 4, and a concentration in mol/l one from 0 to 0 with the default of three
#   decimals.
# Expected: the interval of the data, rounded at the end.
# Instead: statistics of the column itself, or decimal_places=12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'scipy==1.16.2' 'stata-codebook==0.2.0'
cat > expected.txt <<'EXPECTED'
potassium, 0 decimals: 4 to 4, right 4.29625 to 4.66375
potassium, 1 decimals: 4.3 to 4.7, right 4.29625 to 4.66375
potassium, 12 decimals: 4.29625 to 4.66375, right 4.29625 to 4.66375
in mol/l, 3 decimals: 0.004 to 0.004, right 0.00429625 to 0.00466375
in mol/l, 12 decimals: 0.00429625 to 0.00466375, right 0.00429625 to 0.00466375
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from stata_codebook.codebook import codebook

potassium = [4.1, 4.2, 4.4, 4.5, 4.6, 4.7, 4.85, 4.9, 4.05, 4.5]
table = pd.DataFrame({'potassium': potassium, 'in mol/l': [value / 1000 for value in potassium]})
for name, places in (('potassium', 0), ('potassium', 1), ('potassium', 12), ('in mol/l', 3), ('in mol/l', 12)):
    shown = codebook(table, name, advanced=True, decimal_places=places).iloc[0]
    half = 1.96 * table[name].std() / len(table) ** 0.5
    low, high = shown['95% CI']
    print(f"{name}, {places} decimals: {low:.6g} to {high:.6g}, "
          f"right {table[name].mean() - half:.6g} to {table[name].mean() + half:.6g}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

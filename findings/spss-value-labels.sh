#!/usr/bin/env bash
# pandas.read_spss turns ages into a category of numbers and texts because of one value label, and
# merges two codes that have the same label.
#
# Packages: pandas 3.1.1, pyreadstat 1.3.7.
# Behaviour: convert_categoricals is True by default. One label (999 = unknown) makes the column a
#   category whose labelled entry is a text and whose other entries stay numbers, so its mean fails.
#   Wards 1 and 2, both labelled ICU, cannot be told apart afterwards.
# Expected: numbers stay numbers; codes stay distinct.
# Instead: read_spss(..., convert_categoricals=False); take labels from pyreadstat's metadata.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'pyreadstat==1.3.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
age category [41.0, 67.0, 'unknown', 41.0]
ward ['ICU', 'ICU', 'surgery']
codes [1.0, 2.0, 3.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyreadstat

ages = pd.DataFrame({'age': [41.0, 67.0, 999.0, 41.0]})
pyreadstat.write_sav(ages, 'ages.sav', variable_value_labels={'age': {999: 'unknown'}})
read = pd.read_spss('ages.sav')['age']
print('age', read.dtype, read.tolist())
wards = pd.DataFrame({'ward': [1.0, 2.0, 3.0]})
labels = {'ward': {1: 'ICU', 2: 'ICU', 3: 'surgery'}}
pyreadstat.write_sav(wards, 'wards.sav', variable_value_labels=labels)
print('ward', pd.read_spss('wards.sav')['ward'].tolist())
codes = pd.read_spss('wards.sav', convert_categoricals=False)['ward']
print('codes', codes.tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

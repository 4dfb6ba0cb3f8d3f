#!/usr/bin/env bash
# DataSynthesizer writes the largest income and the share of missing ones without noise.
#
# Packages: DataSynthesizer 0.1.13, pandas 2.3.3, numpy 1.26.4.
# Behaviour: describe_dataset_in_independent_attribute_mode(epsilon=0.1) adds noise to the counts of
#   each column, and writes minimum, maximum and rate of missing values of the column as they are.
# Expected: no number of one person, such as the largest income, in what is made under epsilon.
# Why it matters here: the description is called differentially private and is made to be published.
# Instead: numerical_attribute_ranges and a file of categories for all columns, so that bounds do
#   not come from the data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'DataSynthesizer==0.1.13' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
income: smallest 1500.0 largest 987654.0 missing 0.041
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from DataSynthesizer.DataDescriber import DataDescriber

incomes = np.linspace(1500, 5000, 1000)
incomes[-1] = 987654  # one person
incomes[500:541] = np.nan
pd.DataFrame({'income': incomes}).to_csv('table.csv', index=False)
describer = DataDescriber()
describer.describe_dataset_in_independent_attribute_mode('table.csv', epsilon=0.1)
income = describer.data_description['attribute_description']['income']
print('income: smallest', income['min'], 'largest', income['max'], 'missing', income['missing_rate'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

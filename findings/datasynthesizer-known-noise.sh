#!/usr/bin/env bash
# DataSynthesizer draws its private noise from seed 0, and releases the largest income as it is.
#
# Packages: DataSynthesizer 0.1.13, pandas 2.3.3, numpy 1.26.4.
# Behaviour: describe_dataset_in_independent_attribute_mode(epsilon=0.1) has the argument seed with
#   the default 0. The noise depends on the seed and the shape of the table alone, so the
#   description of anybody's table of that shape shows it; subtracted, the true counts are left.
#   Minimum, maximum and rate of missing values of each column are written without noise. The
#   correlated mode spends epsilon on these counts and epsilon again on the network.
# Expected: noise that nobody can repeat, and no number of one person, such as the largest income.
# Why it matters here: the file is called differentially private and is made to be published.
# Instead: pass a seed from secrets.randbits(32), numerical_attribute_ranges and a file of
#   categories for all columns, and half of the epsilon.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'DataSynthesizer==0.1.13' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
income: largest 987654 missing 0.041
diagnosis: released [214, 481, 306] less the noise of the other table [188, 499, 313]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from DataSynthesizer.DataDescriber import DataDescriber

noises = []


def laplace(*arguments, draw=np.random.laplace, **settings):
    noises.append(draw(*arguments, **settings))
    return noises[-1]


def describe(shares, largest, missing):
    random = np.random.default_rng()
    table = pd.DataFrame({'diagnosis': np.repeat(['F20', 'I10', 'J45'], shares),
                          'income': random.integers(1000, 5000, 1000).astype(float)})
    table.loc[0, 'income'] = largest
    table.loc[1:missing, 'income'] = np.nan
    table.to_csv('table.csv', index=False)
    describer = DataDescriber()
    describer.describe_dataset_in_independent_attribute_mode('table.csv', epsilon=0.1)
    return describer.data_description['attribute_description']


np.random.laplace = laplace
private = describe([188, 499, 313], 987654, 41)
describe([400, 300, 300], 8000, 5)  # anybody's table of 1000 rows and these columns
income, diagnosis = private['income'], private['diagnosis']
print('income: largest', income['max'], 'missing', income['missing_rate'])
released, noise = np.array(diagnosis['distribution_probabilities']), noises[2]
shares = released * (1 + noise.sum()) - noise
print('diagnosis: released', np.round(1000 * released).astype(int).tolist(),
      'less the noise of the other table', np.round(1000 * shares).astype(int).tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

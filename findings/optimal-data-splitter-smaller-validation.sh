#!/usr/bin/env bash
# The validation set of optimal-data-splitter is smaller than the portion of the data that was asked for.
#
# Packages: optimal-data-splitter 0.1.3, scikit-learn 1.7.2, scipy 1.16.3, pandas 2.3.3, numpy 1.26.4, matplotlib 3.10.8.
# Behaviour: split_data takes the test set first, and then val_percent * (1 - test_percent) of the rest. The rest is
#   1 - test_percent of the data, so the validation set is val_percent * (1 - test_percent)^2. The portion of the
#   rest should be val_percent / (1 - test_percent).
# Expected: "val_percent = 0.1; Portion of data to place in validation set".
# Instead: pass val_percent / (1 - test_percent)^2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'optimal-data-splitter==0.1.3' \
  'scikit-learn==1.7.2' 'scipy==1.16.3' 'pandas==2.3.3' 'numpy==1.26.4' 'matplotlib==3.10.8'
cat > expected.txt <<'EXPECTED'
asked for: test 10%, validation 10%; given: test 10.0%, validation 8.1%; val * (1 - test)^2 8.1%
asked for: test 20%, validation 20%; given: test 20.0%, validation 12.8%; val * (1 - test)^2 12.8%
asked for: test 30%, validation 30%; given: test 30.0%, validation 14.7%; val * (1 - test)^2 14.7%
asked for: test 50%, validation 10%; given: test 50.0%, validation 2.5%; val * (1 - test)^2 2.5%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import os

os.environ['MPLBACKEND'] = 'Agg'
import numpy as np
import pandas as pd
from optimal_data_splitter import OptimalDataSplitter

random = np.random.default_rng(0)
for validation, test in ((0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (0.1, 0.5)):
    people = pd.DataFrame({'id': range(10000), 'ill': random.integers(0, 2, 10000)})
    config = {'val_percent': validation, 'test_percent': test, 'num_iterations': 5, 'save_output': False}
    shares = OptimalDataSplitter(people, config).split_data().split.value_counts(normalize=True)
    print(f'asked for: test {test:.0%}, validation {validation:.0%}; given: test {shares["test"]:.1%},',
          f'validation {shares["val"]:.1%}; val * (1 - test)^2 {validation * (1 - test) ** 2:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

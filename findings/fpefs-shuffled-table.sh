#!/usr/bin/env bash
# fpefs gives each value the class of another person where the rows were shuffled or sampled.
#
# Packages: fpefs 0.1, numpy 2.4.6, pandas 2.3.3.
# Behaviour: The values of a row are looked up by its place and its class by the label of the index. After
#   pandas' sample, sort_values or train_test_split both are different, so that each value meets the class
#   of somebody else. A column that separates all classes then looks like noise, without a message. After
#   reset_index the result is the one before.
# Expected: the same probabilities for each order of the rows.
# Instead: reset_index(drop=True) before the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'fpefs==0.1'
cat > expected.txt <<'EXPECTED'
in order: marker 0.83, noise 0.00
shuffled: marker 0.00, noise 0.00
shuffled, new index: marker 0.83, noise 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from fpefs import fpefs

random = np.random.default_rng(0)
table = pd.DataFrame({'marker': np.repeat([0.0, 1.0, 2.0], 20), 'noise': random.integers(0, 4, 60).astype(float),
                      'diagnosis': np.repeat(['a', 'b', 'c'], 20)})
shuffled = table.sample(frac=1, random_state=0)
for name, rows in (('in order', table), ('shuffled', shuffled), ('shuffled, new index', shuffled.reset_index(drop=True))):
    print(f'{name}:', ', '.join(f'{column} {value:.2f}' for column, value in fpefs(rows).to_numpy()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

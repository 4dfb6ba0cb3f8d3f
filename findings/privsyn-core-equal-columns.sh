#!/usr/bin/env bash
# privsyn-core makes the same column of independent ones.
#
# Packages: privsyn-core 0.1.1, numpy 2.4.6, pandas 2.3.3, networkx 3.6.1.
# Behaviour: append_attrs gives the people with one value of a partner the values of a column in
#   order, first the share of zeros and then the ones, and shuffles the rows of a copy of the table
#   afterwards, which changes nothing. Two columns that are appended to the same partner, or to
#   partners that were laid out so, are then equal. Six independent columns of zeros and ones, whose
#   correlations are below 0.05, contain at least one pair with a correlation above 0.9.
# Expected: correlations near 0.
# Instead: shuffle the values of an appended column within each value of its partner.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'privsyn-core==0.1.1' 'numpy==2.4.6' 'pandas==2.3.3' 'networkx==3.6.1'
cat > expected.txt <<'EXPECTED'
real: largest correlation below 0.05: True
synthetic, seed 0: 4 pairs chosen, largest correlation above 0.9: True
synthetic, seed 1: 4 pairs chosen, largest correlation above 0.9: True
synthetic, seed 2: 4 pairs chosen, largest correlation above 0.9: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

logging.disable(logging.WARNING)
import numpy as np
import pandas as pd
from privsyn import fit_privsyn

random = np.random.default_rng(0)
real = pd.DataFrame(random.integers(0, 2, (5000, 6)), columns=list('abcdef'))
pairs = np.triu_indices(6, 1)
print(f'real: largest correlation below 0.05: {real.corr().abs().to_numpy()[pairs].max() < 0.05}')
for seed in range(3):
    model = fit_privsyn(real, dict.fromkeys(real, 2), epsilon=1000.0, random_state=seed)
    synthetic = model.sample(5000)
    largest = np.nanmax(synthetic.corr().abs().to_numpy()[pairs])
    print(f'synthetic, seed {seed}: {len(model.selected_marginals_)} pairs chosen, largest correlation above 0.9: {largest > 0.9}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

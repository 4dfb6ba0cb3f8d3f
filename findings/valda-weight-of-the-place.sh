#!/usr/bin/env bash
# The Beta Shapley values of valda are weighted by the place of an example in the table.
#
# Packages: valda 0.1.10, torch 2.13.0, scikit-learn 1.9.1, numpy 2.4.6, tqdm 4.67.1.
# Behaviour: the weight of a marginal contribution belongs to the number of examples it is added
#   to. beta_shapley draws this number, and looks the weight up with the index of the example. With
#   the default Beta(1, 16) examples at the beginning of the table have a value of 0, whatever they
#   are; with Beta(1, 1) all weights are equal and nothing is seen.
# Expected: the same values, up to chance, for copies of the same people ("symmetry" of
#   semivalues).
# Why it matters here: examples of low value are removed as noise, here the first rows of the
#   table.
# Instead: alpha = beta = 1, or shuffle the rows and average over many orders.
# Source: Kwon and Zou, Beta Shapley, a Unified and Noise-reduced Data Valuation Framework for
#   Machine Learning, AISTATS 2022.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'scikit-learn==1.9.1' 'numpy==2.4.6' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'valda==0.1.10'
cat > expected.txt <<'EXPECTED'
Beta(1, 1): mean size of the values in the five copies, in per cent of their sum 22 20 18 19 20
Beta(1, 16): mean size of the values in the five copies, in per cent of their sum 0 0 0 4 96
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import os
import random
import sys

import numpy as np
from valda.valuation import DataValuation

sys.stderr = open(os.devnull, 'w')  # progress bars
draws = np.random.default_rng(0)
people = draws.normal(size=(8, 2))
table, labels = np.tile(people, (5, 1)), np.tile((people[:, 0] > 0).astype(int), 5)  # five copies of each
held = draws.normal(size=(200, 2))
judge = DataValuation(table, labels, held, (held[:, 0] > 0).astype(int))
for alpha, beta in ((1, 1), (1, 16)):
    random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        values = judge.estimate(method='beta-shapley', params={**judge.params, 'beta_iter': 20, 'beta_chain': 5, 'alpha': alpha, 'beta': beta})
    sizes = [np.abs([values[8 * copy + place] for place in range(8)]).mean() for copy in range(5)]
    print(f'Beta({alpha}, {beta}): mean size of the values in the five copies, in per cent of their sum', ' '.join(f'{100 * size / sum(sizes):.0f}' for size in sizes))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

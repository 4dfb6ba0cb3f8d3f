#!/usr/bin/env bash
# The Laplace estimator of LPDT shows the cell of each person: its noise is scaled to the range of the answers.
#
# Packages: LPDT 0.0.2, scikit-learn 1.6.1, scipy 1.15.3, numba 0.61.2, numpy 2.2.6.
# Behaviour: each person reports, for each cell of the tree, their answer times an indicator of the
#   cell, with Laplace noise of twice the range of the answers by ε. Another person may be in another
#   cell: the report then changes from 0 to the answer, not by the range. Body temperatures from 36
#   to 38 have a range of 2, and noise of a few degrees hides nothing of a difference of 37. The range
#   is also the one of the private answers themselves.
# Expected: a noise of at least the largest answer, or answers that are centred and clipped first;
#   the ε of a report is at most the one that was asked for.
# Why it matters here: the library is called locally private, and the cell holds the private features.
# Instead: subtract the middle of a public range from the answers before fit, and clip them to it.
# Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy: the Laplace mechanism.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.6.1' 'scipy==1.15.3' 'numba==0.61.2' 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'LPDT==0.0.2'
cat > expected.txt <<'EXPECTED'
answers from -1 to 1, epsilon 0.5: 2 cells, noise of 8; epsilon of one report that moves to another cell 0.5
answers from -1 to 1, epsilon 2: 2 cells, noise of 2; epsilon of one report that moves to another cell 2.0
temperatures from 36 to 38, epsilon 0.5: 2 cells, noise of 8; epsilon of one report that moves to another cell 9.8
temperatures from 36 to 38, epsilon 2: 2 cells, noise of 2; epsilon of one report that moves to another cell 39.0
heights from 150 to 200, epsilon 0.5: 2 cells, noise of 200; epsilon of one report that moves to another cell 2.2
heights from 150 to 200, epsilon 2: 2 cells, noise of 50; epsilon of one report that moves to another cell 9.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from LPDT import LPDTreeRegressor

random = np.random.default_rng(0)
features, public = random.uniform(size=(2, 500, 1))
for title, low, high in (('answers from -1 to 1', -1, 1), ('temperatures from 36 to 38', 36, 38),
                         ('heights from 150 to 200', 150, 200)):
    answers, known = random.uniform(low, high, (2, 500))
    answers[:2] = low, high
    for epsilon in (0.5, 2):
        model = LPDTreeRegressor(epsilon=epsilon, public_X=public, public_Y=known, max_depth=1, estimator='laplace')
        leaves = model.fit(features, answers).get_all_node()
        true = 2 * np.abs(answers).max() / leaves[0].noise_level_Z + 2 / leaves[0].noise_level_W
        print(f'{title}, epsilon {epsilon}: {len(leaves)} cells, noise of {leaves[0].noise_level_Z:.0f};',
              f'epsilon of one report that moves to another cell {true:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

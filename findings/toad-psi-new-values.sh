#!/usr/bin/env bash
# toad's population stability index leaves out values that are in one sample only: two samples of a
# continuous score always have an index of 0.
#
# Packages: toad 0.1.7, scikit-learn 1.9.1 (which it imports and does not ask for), pandas 2.3.3,
#   numpy 2.4.6.
# Behaviour: PSI compares the shares of single values unless a combiner is passed. A value that is
#   missing in one of the samples gives NaN and is skipped by the sum. Scores with decimals have no
#   value in common, so that the index of any two samples is 0, which reads as stable, however far
#   apart they are. A category that half of the new clients have and nobody had before adds nothing
#   either.
# Expected: an error for continuous values without bins, and a large index for a new category.
# Instead: pass a combiner with bins for numbers, and count new categories by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'toad==0.1.7' 'scikit-learn==1.9.1' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
scores shifted by 0 standard deviations: 0.00, with bins 0.00
scores shifted by 1 standard deviations: 0.00, with bins 0.88
scores shifted by 5 standard deviations: 0.00, with bins 1.53
10 % in a new category: 0.01
50 % in a new category: 0.35
90 % in a new category: 2.07
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from toad.metrics import PSI

random = np.random.default_rng(0)
base = pd.Series(random.normal(size=5000))
for shift in (0, 1, 5):
    test = pd.Series(random.normal(shift, 1, size=5000))
    bins = PSI(test, base, combiner=[-1.0, 0.0, 1.0])
    print(f'scores shifted by {shift} standard deviations: {PSI(test, base):.2f}, with bins {bins:.2f}')
old = pd.Series(['employed'] * 50 + ['retired'] * 50)
for share in (10, 50, 90):
    new = pd.Series(['employed'] * 10 + ['retired'] * 10 + ['student'] * (20 * share // (100 - share)))
    print(f'{share} % in a new category: {PSI(new, old):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

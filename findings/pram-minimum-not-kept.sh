#!/usr/bin/env bash
# pram changes rare values far more often than the minimum that it is asked to keep: with a minimum of 80 %, 48 % of
# the people with a rare disease keep it.
#
# Packages: pram 0.2.0, pandas 2.2.3, numpy 1.26.4.
# Behaviour: m is documented as the minimum probability that a value stays. It is written into the diagonal of the
#   matrix, beside the other probabilities, which add up to almost 1 for a rare value. Then each column is divided by
#   its sum, 1.75, and 0.8 becomes 0.46. With the default alpha of 0.5 half of the distance to 1 is left.
# Expected: 0.8 on the diagonal and 0.2 shared by the others, as in the R package whose behaviour it says to have.
# Why it matters here: the rare values, which the minimum is for, lose most: half of the people with the disease are
#   others.
# Instead: scale the other probabilities to 1 - m, as below.
# Source: Gouweleeuw and others (1998), "Post randomisation for statistical disclosure control", Journal of Official
#   Statistics 14(4); the documentation of pram, "minimum diagonal value".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pram==0.2.0' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
minimum 0.8, alpha 1.0: 0.48 keep the disease, by the formula of pram 0.46, documented at least 0.8
minimum 0.8, alpha 0.5: 0.73 keep the disease, by the formula of pram 0.73, documented at least 0.8
minimum 0.9, alpha 1.0: 0.49 keep the disease, by the formula of pram 0.49, documented at least 0.9
minimum 0.9, alpha 0.5: 0.72 keep the disease, by the formula of pram 0.74, documented at least 0.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from pram import pram

np.random.seed(0)
people = pd.DataFrame({'disease': ['no'] * 19000 + ['yes'] * 1000})
share = (people['disease'] == 'yes').mean()
for minimum in (0.8, 0.9):
    for alpha in (1.0, 0.5):
        changed = pram(people.copy(), m=minimum, alpha=alpha)
        kept = (changed['disease'] == 'yes')[people['disease'] == 'yes'].mean()
        formula = alpha * minimum / (minimum + 1 - share) + 1 - alpha
        print(f'minimum {minimum}, alpha {alpha}: {kept:.2f} keep the disease, by the formula of pram {formula:.2f}, '
              f'documented at least {minimum}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

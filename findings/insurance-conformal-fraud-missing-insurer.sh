#!/usr/bin/env bash
# An insurer that does not know a claim, documented as neutral, clears it in the Stouffer
# combination of insurance-conformal-fraud.
#
# Packages: insurance-conformal-fraud 0.1.0, polars 1.35.2, scikit-learn 1.9.1, scipy 1.17.1, numpy
#   2.4.6.
# Behaviour: stouffer_combine with missing='impute_null' puts a p-value of 1 in the place of a
#   missing one, as fisher_combine does. In Fisher's method that adds nothing. In Stouffer's it is
#   a Z-score of -7.9, the strongest evidence against fraud that there is, which outweighs two
#   insurers that are sure.
# Expected: "no evidence from that source", a Z-score of 0, which is a p-value of 0.5.
# Why it matters here: fraud rings spread claims over insurers, and most insurers know few of the
#   claims.
# Instead: missing='drop', or 0.5 in the place of missing p-values.
# Source: Stouffer et al., The American Soldier, 1949.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polars==1.35.2' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'insurance-conformal-fraud==0.1.0'
cat > expected.txt <<'EXPECTED'
p-values [0.0001, 0.0001] and one unknown: Fisher 1.9e-06, Stouffer 0.61, left out 7.2e-08, with a Z-score of 0 8.8e-06
p-values [1e-06, 1e-06] and one unknown: Fisher 4.1e-10, Stouffer 0.18, left out 8.9e-12, with a Z-score of 0 2e-08
p-values [1e-06, 1e-06, 1e-06] and one unknown: Fisher 1.3e-14, Stouffer 0.00079, left out 9.1e-17, with a Z-score of 0 5e-13
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from insurance_conformal_fraud.consortium import fisher_combine, stouffer_combine
from scipy.stats import norm

for known in ([1e-4, 1e-4], [1e-6, 1e-6], [1e-6, 1e-6, 1e-6]):
    arrays = [np.array([p]) for p in known] + [np.array([np.nan])]
    neutral = norm.sf(norm.isf(known).sum() / np.sqrt(len(arrays)))
    print(f'p-values {known} and one unknown: Fisher {fisher_combine(arrays, missing="impute_null")[0]:.2g}, '
          f'Stouffer {stouffer_combine(arrays, missing="impute_null")[0]:.2g}, left out {stouffer_combine(arrays, missing="drop")[0]:.2g}, '
          f'with a Z-score of 0 {neutral:.2g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The upper confidence limit that binomialdpy gives for a private proportion is the confidence level
# itself.
#
# Packages: binomialdpy 0.1.5, numpy 2.4.6, scipy 1.17.1.
# Behaviour: ci.upper solves for the limit, and returns one minus alpha in its place, one number
#   however many samples it was given. With alpha 0.05 it is 0.95 for 2 and for 10 successes of 30,
#   which looks like a cautious bound, and for 292 of 300, where it lies below the lower limit.
#   ci.lower is right for 30 trials; for 300 its search does not leave its start, 0.5.
# Expected: the proportion for which the right-sided p-value is 1 - alpha, as ci.lower finds the one
#   for alpha.
# Instead: solve it with pvalue.right, as below.
# Source: Awan and Slavković, Differentially private inference for binomial data (2020).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'binomialdpy==0.1.5' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
2.3 of 30: binomialdpy 0.00 to 0.95, solved 0.00 to 0.22
10.4 of 30: binomialdpy 0.20 to 0.95, solved 0.20 to 0.51
292.2 of 300: binomialdpy 0.50 to 0.95, solved 0.95 to 0.99
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import exp

from binomialdpy import ci, pvalue
from scipy.optimize import brentq

noise, alpha = exp(-1), 0.05
for noisy, trials in ((2.3, 30), (10.4, 30), (292.2, 300)):
    p_value = lambda share, level: pvalue.right([noisy], n=trials, p=share, b=noise, q=0)[0] - level
    lower, upper = (brentq(p_value, 1e-9, 1 - 1e-9, args=(level,)) for level in (alpha, 1 - alpha))
    print(f'{noisy} of {trials}: binomialdpy {ci.lower(alpha, [noisy], trials, noise, 0)[0]:.2f}',
          f'to {ci.upper(alpha, [noisy], trials, noise, 0):.2f}, solved {lower:.2f} to {upper:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

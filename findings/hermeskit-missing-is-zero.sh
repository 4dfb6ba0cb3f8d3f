#!/usr/bin/env bash
# The population stability index of hermeskit takes missing values for 0.00001 and writes this into the table of its caller:
# half of the temperatures missing are half of the patients with 0 degrees, and stay so.
#
# Packages: hermeskit 1.0.7, numpy 1.26.4, pandas 2.3.3, scikit-learn 1.5.2, ipython 8.31.0, pyyaml 6.0.2.
# Behaviour: calculate_psi allows missing values by default and replaces them in the array that it is given. The index then
#   sees them in the lowest class, together with the lowest values, and where a variable can be negative in the
#   middle of its distribution. A later mean of the caller is wrong.
# Expected: a class of their own, and an unchanged table.
# Instead: pass a copy without missing values, and compare the shares of missing values by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scikit-learn==1.5.2' 'ipython==8.31.0' 'pyyaml==6.0.2' 'hermeskit==1.0.7'
cat > expected.txt <<'EXPECTED'
temperature, half of it missing: index 1.06, with a class for missing values 4.61; mean before 37.0, afterwards 18.5
change of weight, half of it missing: index 1.08, with a class for missing values 4.61; mean before -0.0, afterwards -0.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hermeskit.metrics import calculate_psi

random = np.random.default_rng(0)

def by_hand(old, new):
    limits = np.nanquantile(old, np.arange(0.1, 1, 0.1))
    index = 0.0
    for k in range(11):
        a, b = (np.mean(np.isnan(x) if k == 10 else (np.searchsorted(limits, x) == k) & ~np.isnan(x)) for x in (old, new))
        a, b = max(a, 0.0001), max(b, 0.0001)
        index += (b - a) * np.log(b / a)
    return index

means = np.array([37.0, 0.0])
before, after = random.normal(means, 1, size=(4000, 2)), random.normal(means, 1, size=(4000, 2))
after[:2000] = np.nan
right = [by_hand(before[:, k], after[:, k]) for k in (0, 1)]
known = np.nanmean(after, axis=0)
seen = calculate_psi(before, after, axis=1)['psi']
for k, name in enumerate(('temperature', 'change of weight')):
    print(f'{name}, half of it missing: index {seen[k]:.2f}, with a class for missing values {right[k]:.2f}; '
          f'mean before {known[k]:.1f}, afterwards {np.nanmean(after[:, k]):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

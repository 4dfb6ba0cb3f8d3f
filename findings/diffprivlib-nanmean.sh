#!/usr/bin/env bash
# diffprivlib's nanmean, nanvar and nanstd make their noise for the length of the column, missing
# values included: with 99 of 100 missing, ε is 100 times the stated one.
#
# Packages: diffprivlib 0.6.6, scikit-learn 1.5.2, scipy 1.15.3, numpy 2.2.6.
# Behaviour: the mean of n values within 0 and 100 changes by 100 / n where one changes. nanmean
#   averages the values that are there, and divides the range by the number of all entries. A
#   laboratory value that was measured in 10 of 1,000 patients is released with the noise of a mean
#   of 1,000. nanvar and nanstd do the same; nansum is right. The accountant records the ε that was
#   asked for.
# Expected: noise for the number of values, which is private itself: a noisy sum over a noisy
#   count.
# Instead: drop the missing values and call mean (if their number is public), or divide nansum by
#   count_nonzero, each with half of ε.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'diffprivlib==0.6.6' 'scikit-learn==1.5.2' 'scipy==1.15.3' 'numpy==2.2.6'
cat > expected.txt <<'EXPECTED'
1000 of 1000 measured: noise of nanmean 0.14, needed 0.14; true epsilon about 1 (one patient moves it by 0.05)
100 of 1000 measured: noise of nanmean 0.14, needed 1.41; true epsilon about 10 (one patient moves it by 0.51)
10 of 1000 measured: noise of nanmean 0.14, needed 14.14; true epsilon about 99 (one patient moves it by 5.13)
nansum of 10: noise 142, needed 141
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from diffprivlib import tools

EPSILON, BOUNDS, ROWS, DRAWS = 1.0, (0, 100), 1000, 2000


def spread(release, values):
    draws = [release(values, epsilon=EPSILON, bounds=BOUNDS, random_state=seed)
             for seed in range(DRAWS)]
    return np.std(draws)


measured = np.random.default_rng(0).normal(50, 10, size=ROWS).clip(*BOUNDS)
for count in (1000, 100, 10):
    column = measured.copy()
    column[count:] = np.nan
    needed = 2**0.5 * (BOUNDS[1] - BOUNDS[0]) / count / EPSILON  # std of Laplace noise
    seen = spread(tools.nanmean, column)
    changed = column.copy()
    changed[0] = BOUNDS[0]
    moved = abs(np.nanmean(changed) - np.nanmean(column))
    print(f'{count} of {ROWS} measured: noise of nanmean {seen:.2f}, needed {needed:.2f};',
          f'true epsilon about {needed / seen * EPSILON:.0f} (one patient moves it by {moved:.2f})')
column = measured.copy()
column[10:] = np.nan
sums = spread(tools.nansum, column)
print(f'nansum of 10: noise {sums:.0f}, needed {2**0.5 * 100:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

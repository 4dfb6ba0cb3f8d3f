#!/usr/bin/env bash
# The average Hausdorff distance of miseval is the largest distance, so one stray pixel makes it 44 where
# the average is 0.3, and it does not know the size of a voxel.
#
# Packages: miseval 1.3.0, hausdorff 0.2.6, numba 0.68.1, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: evaluate(truth, predicted, metric='AHD') returns the maximum of the distances of all border
#   pixels, which is the Hausdorff distance. The documentation recommends this metric for the
#   position of contours. It counts pixels, also where these are 5 mm thick.
# Expected: the mean of the two mean distances between the borders.
# Why it matters here: noise in training leaves stray pixels, for which the average is chosen.
# Instead: SimpleITK.HausdorffDistanceImageFilter().GetAverageHausdorffDistance(), with the spacing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'miseval==1.3.0' 'hausdorff==0.2.6' 'numba==0.68.1' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1'
cat > expected.txt <<'EXPECTED'
the same: miseval AHD 0.00, average 0.00, largest 0.00
one stray pixel: miseval AHD 43.84, average 0.28, largest 43.84
1 pixel to the right: miseval AHD 1.00, average 0.50, largest 1.00
both: miseval AHD 43.84, average 0.78, largest 43.84
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from miseval import evaluate
from scipy.ndimage import binary_erosion
from scipy.spatial import KDTree


def measure(truth, predicted):
    borders = [np.argwhere(mask & ~binary_erosion(mask)) for mask in (truth == 1, predicted == 1)]
    first, second = (KDTree(border) for border in borders)
    ways = second.query(borders[0])[0], first.query(borders[1])[0]
    return np.mean([way.mean() for way in ways]), max(way.max() for way in ways)


truth = np.zeros((64, 64), dtype=int)
truth[10:30, 10:30] = 1
right = truth.copy()
stray = truth.copy()
stray[60, 60] = 1
shifted = np.roll(truth, 1, axis=1)
both = shifted.copy()
both[60, 60] = 1
for name, predicted in (('the same', right), ('one stray pixel', stray), ('1 pixel to the right', shifted),
                        ('both', both)):
    average, largest = measure(truth, predicted)
    seen = evaluate(truth, predicted, metric='AHD')
    print(f'{name}: miseval AHD {seen:.2f}, average {average:.2f}, largest {largest:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# The Hausdorff distance of miseval is 0 for a lesion that is found 20 pixels below its place: it takes
# each row of a mask for a point in space.
#
# Packages: miseval 1.3.0, hausdorff 0.2.6, numba 0.68.1, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: evaluate(truth, predicted, metric='HD') gives the two masks to a function for lists of points,
#   one in each row. A mask of 64 by 64 pixels becomes 64 points of 64 coordinates, which are 0 and 1. The
#   result is near the square root of the width of a lesion, hardly depends on where it is, and is 0
#   where it was moved along the first axis. The class that is asked for is ignored.
# Expected: the largest distance between the borders, 20 pixels.
# Why it matters here: the distance is reported beside the overlap for segmentations that were trained
#   with noise.
# Instead: max of scipy.spatial.distance.directed_hausdorff both ways of numpy.argwhere of the masks, or
#   metric='AHD', which is the Hausdorff distance, not its average.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'miseval==1.3.0' 'hausdorff==0.2.6' 'numba==0.68.1' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1'
cat > expected.txt <<'EXPECTED'
lesion found in its place: miseval 0.00, by points 0.00
lesion found 1 pixel to the right: miseval 1.41, by points 1.00
lesion found 20 pixels to the right: miseval 3.16, by points 20.00
lesion found 20 pixels below: miseval 0.00, by points 20.00
lesion found 40 pixels below: miseval 0.00, by points 40.00
lesion found 40 pixels in both directions: miseval 3.16, by points 56.57
class 0, where class 2 is moved by 10: miseval 8.94, by points 10.00
class 1, where class 2 is moved by 10: miseval 8.94, by points 0.00
class 2, where class 2 is moved by 10: miseval 8.94, by points 10.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from miseval import evaluate
from scipy.spatial.distance import directed_hausdorff


def measure(truth, predicted):
    first, second = np.argwhere(truth), np.argwhere(predicted)
    return max(directed_hausdorff(first, second)[0], directed_hausdorff(second, first)[0])


truth = np.zeros((64, 64), dtype=int)
truth[10:20, 10:20] = 1
SHIFTS = {
    'in its place': (0, 0), '1 pixel to the right': (0, 1), '20 pixels to the right': (0, 20),
    '20 pixels below': (20, 0), '40 pixels below': (40, 0), '40 pixels in both directions': (40, 40),
}
for name, shift in SHIFTS.items():
    predicted = np.roll(truth, shift, axis=(0, 1))
    seen = evaluate(truth, predicted, metric='HD')
    print(f'lesion found {name}: miseval {seen:.2f}, by points {measure(truth, predicted):.2f}')
labels = truth.copy()
labels[40:60, 40:60] = 2
moved = labels.copy()
moved[moved == 2] = 0
moved[40:60, 30:50] = 2
for label, seen in enumerate(evaluate(labels, moved, metric='HD', multi_class=True, n_classes=3)):
    print(f'class {label}, where class 2 is moved by 10: miseval {seen:.2f}, '
          f'by points {measure(labels == label, moved == label):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

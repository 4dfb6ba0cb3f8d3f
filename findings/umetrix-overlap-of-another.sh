#!/usr/bin/env bash
# umetrix gives each object the overlap of another one: its pairs of objects are in the order of a set, and
# the overlaps beside them in the order of the objects.
#
# Packages: umetrix 0.2.0, numpy 2.2.6, scipy 1.15.3, scikit-image 0.25.2, scikit-learn 1.7.2,
#   pandas 2.3.3, matplotlib 3.10.7.
# Behaviour: true_positives is list(set(pairs)), so that it loses the order of per_object_IoU. The list of
#   localization errors follows true_positives. plot() and to_napari() write the overlaps into the image
#   by this order: the object that is found exactly is shown with 0.09, and one with a third with 1.00.
# Expected: two lists that belong to each other.
# Instead: compute the overlap of each pair in true_positives from the labelled images.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'umetrix==0.2.0' 'numpy==2.2.6' 'scipy==1.15.3' \
  'scikit-image==0.25.2' 'scikit-learn==1.7.2' 'pandas==2.3.3' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
object 4: overlap in umetrix 0.09, shown in napari 0.09, by hand 1.00
object 1: overlap in umetrix 0.33, shown in napari 0.33, by hand 0.09
object 3: overlap in umetrix 0.60, shown in napari 0.60, by hand 0.60
object 2: overlap in umetrix 1.00, shown in napari 1.00, by hand 0.33
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
import umetrix
from scipy.ndimage import label

truth, found = numpy.zeros((2, 40, 120), int)
for place, shift in enumerate((10, 6, 3, 0)):
    start = 5 + 30 * place
    truth[10:22, start:start + 12] = 1
    found[10:22, start + shift:start + shift + 12] = 1
metrics = umetrix.calculate(truth, found)
truths, _ = label(truth)
founds, _ = label(found)
shown = metrics.to_napari()[1]['iou']
for (one, other), overlap, beside in zip(metrics.true_positives, metrics.per_object_IoU, shown):
    mask, hit = truths == one, founds == other
    right = (mask & hit).sum() / (mask | hit).sum()
    print(f'object {one}: overlap in umetrix {overlap:.2f}, shown in napari {beside:.2f}, by hand {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

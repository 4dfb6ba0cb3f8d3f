#!/usr/bin/env bash
# seg-metrics gives a segmentation that misses a whole lesion a surface distance of 0, the one of a perfect
# segmentation, and one that invents a lesion a rate of false positives of 0 as well.
#
# Packages: seg-metrics 1.2.8, SimpleITK 2.5.7, numpy 2.4.6, pandas 2.3.3.
# Behaviour: where one of the two masks is empty, its map of distances is the empty mask, 0 everywhere, and
#   hd, hd95 and msd of the other mask are 0. Means over patients then are better for each lesion that
#   is missed. For a lesion where there is none, fpr is set to 0 too.
# Expected: a missing value or infinity, as for other packages; the false positives by the others.
# Why it matters here: a model that was trained with much noise finds nothing in small lesions, and has
#   the best mean distance.
# Instead: leave out, or count apart, the patients whose recall is 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'seg-metrics==1.2.8' 'SimpleITK==2.5.7' 'numpy==2.4.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
found: dice 1.0000, recall 1.0000, fpr 0.0000, hd 0.0000, hd95 0.0000, msd 0.0000
found two voxels away: dice 0.6000, recall 0.6000, fpr 0.0015, hd 2.0000, hd95 2.0000, msd 0.7755
missed: dice 0.0000, recall 0.0000, fpr 0.0000, hd 0.0000, hd95 0.0000, msd 0.0000
invented: dice 0.0000, recall 0.0000, fpr 0.0000, hd 0.0000, hd95 0.0000, msd 0.0000
mean hd95 of ten patients, all found two voxels away: 2.0
mean hd95 of ten patients, nine of them missed: 0.2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
from seg_metrics.seg_metrics import write_metrics

logging.disable(logging.CRITICAL)
lesion = np.zeros((32, 32, 32), dtype=np.uint8)
lesion[10:15, 10:15, 10:15] = 1
nothing = np.zeros_like(lesion)
NAMES = ['dice', 'recall', 'fpr', 'hd', 'hd95', 'msd']


def show(name, truth, predicted):
    [scores] = write_metrics(labels=[1], gdth_img=truth, pred_img=predicted, metrics=NAMES)
    print(name + ':', ', '.join(f'{score} {scores[score][0]:.4f}' for score in NAMES))
    return scores['hd95'][0]


show('found', lesion, lesion)
near = show('found two voxels away', lesion, np.roll(lesion, 2, axis=0))
missed = show('missed', lesion, nothing)
show('invented', nothing, lesion)
print(f'mean hd95 of ten patients, all found two voxels away: {near:.1f}')
print(f'mean hd95 of ten patients, nine of them missed: {np.mean([near] + [missed] * 9):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

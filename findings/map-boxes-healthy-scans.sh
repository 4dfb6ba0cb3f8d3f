#!/usr/bin/env bash
# map-boxes never counts a false alarm on an image without annotation, although its option to leave these
# images out is off: a detector that finds ten lesions in each healthy scan has a perfect score.
#
# Packages: map-boxes 1.0.6, numpy 2.4.6, pandas 2.3.3.
# Behaviour: the loop goes over the images of the annotations alone. exclude_not_in_annotations, documented to
#   exclude image IDs that are not in the annotations, changes nothing but what is printed. A row without a
#   label, with which Open Images marks an empty image, brings the image back.
# Expected: with exclude_not_in_annotations=False, the default, a box on a healthy scan is a false positive.
# Why it matters here: healthy people are the ones without an annotation, and their false alarms are the
#   question in screening.
# Instead: a row with a missing label for each image without a lesion, as in the last line.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'map-boxes==1.0.6'
cat > expected.txt <<'EXPECTED'
no false alarm, exclude_not_in_annotations=False: map-boxes 1.000, by hand 1.000
no false alarm, exclude_not_in_annotations=True: map-boxes 1.000, by hand 1.000
900 false alarms, exclude_not_in_annotations=False: map-boxes 1.000, by hand 0.011
900 false alarms, exclude_not_in_annotations=True: map-boxes 1.000, by hand 1.000
900 false alarms, empty rows for healthy scans: map-boxes 0.011
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np

with contextlib.redirect_stdout(io.StringIO()):
    from map_boxes import mean_average_precision_for_boxes

lesions = [[f'ill{scan}', 'lesion', 10, 20, 10, 20] for scan in range(10)]
right = [[f'ill{scan}', 'lesion', 0.8, 10, 20, 10, 20] for scan in range(10)]
false = [[f'healthy{scan}', 'lesion', 0.9, 10 * i, 10 * i + 10, 10, 20] for scan in range(90) for i in range(10)]
empty = [[f'healthy{scan}', np.nan, np.nan, np.nan, np.nan, np.nan] for scan in range(90)]
# all false alarms come first: precision is 10 of 910 at the end, and less before
by_hand = {'no false alarm': 1.0, '900 false alarms': 10 / 910}
for name, boxes in (('no false alarm', right), ('900 false alarms', right + false)):
    for exclude in (False, True):
        score, _ = mean_average_precision_for_boxes(np.array(lesions, object), np.array(boxes, object),
                                                    exclude_not_in_annotations=exclude, verbose=False)
        print(f'{name}, exclude_not_in_annotations={exclude}: map-boxes {score:.3f}, '
              f'by hand {1.0 if exclude else by_hand[name]:.3f}')
score, _ = mean_average_precision_for_boxes(np.array(lesions + empty, object), np.array(right + false, object), verbose=False)
print(f'900 false alarms, empty rows for healthy scans: map-boxes {score:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

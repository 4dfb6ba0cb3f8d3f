#!/usr/bin/env bash
# The average precision of map-boxes depends on the order of the rows: where the worse of two boxes for a
# lesion is listed first, it takes the lesion and the better one counts as a false alarm.
#
# Packages: map-boxes 1.0.6, numpy 2.4.6, pandas 2.3.3.
# Behaviour: boxes are matched to the annotations of their image in the order of the table and sorted by
#   confidence only afterwards. A box of 10 % confidence above one of 90 % for the same lesion makes the
#   second one a false positive at the top of the ranking.
# Expected: boxes in the order of their confidence, as in the Pascal VOC evaluation, and one result for
#   whatever order of the rows.
# Instead: sort the predictions by confidence first, as in the last line.
# Source: Everingham and others, The Pascal Visual Object Classes Challenge, IJCV 88, 2010, section 4.2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'map-boxes==1.0.6'
cat > expected.txt <<'EXPECTED'
better box first: map-boxes 1.00, by hand 1.00
worse box first: map-boxes 0.50, by hand 1.00
worse box first, sorted: map-boxes 1.00, by hand 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np

with contextlib.redirect_stdout(io.StringIO()):
    from map_boxes import mean_average_precision_for_boxes

lesions, boxes = [], []
for scan in range(10):
    lesions.append([f'scan{scan}', 'lesion', 10, 20, 10, 20])
    boxes.append([f'scan{scan}', 'lesion', 0.9 - 0.01 * scan, 10, 20, 10, 20])
    boxes.append([f'scan{scan}', 'lesion', 0.1 - 0.01 * scan, 11, 21, 10, 20])


def by_hand(rows):
    found, hits = set(), []
    for scan, _, confidence, *_ in sorted(rows, key=lambda row: -row[2]):
        hits.append(scan not in found)
        found.add(scan)
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return sum(max(precision[i:]) for i, hit in enumerate(hits) if hit) / len(lesions)


orders = {'better box first': boxes, 'worse box first': boxes[::-1],
          'worse box first, sorted': sorted(boxes[::-1], key=lambda row: -row[2])}
for name, rows in orders.items():
    score, _ = mean_average_precision_for_boxes(np.array(lesions, object), np.array(rows, object), verbose=False)
    print(f'{name}: map-boxes {score:.2f}, by hand {by_hand(rows):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

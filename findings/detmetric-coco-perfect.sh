#!/usr/bin/env bash
# The COCO average precision of detmetric is 0.99 for a perfect detector, since it divides a sum over 100 levels
# of recall by 101.
#
# Packages: detmetric 0.2.0, numpy 2.4.6, matplotlib 3.11.2, opencv-python-headless 5.0.0.93, tqdm 4.70.1.
# Behaviour: COCOInterpolatedAP, documented as 101 points, takes np.linspace(0, 1, 100), which are other levels
#   of recall than 0, 0.01, ... 1, too: a detector that finds half of the lesions has 0.495 in place of 0.505.
#   The interpolations with 11 points and with every point are right.
# Expected: the mean precision at the recalls 0, 0.01, ..., 1, as in COCO: 1 for a perfect detector.
# Instead: multiply by 1.01, which is right for a perfect detector, or use every point.
# Source: Lin and others, Microsoft COCO, ECCV 2014, and the evaluation code of COCO.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'matplotlib==3.11.2' 'opencv-python-headless==5.0.0.93' 'tqdm==4.70.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'detmetric==0.2.0'
cat > expected.txt <<'EXPECTED'
perfect: COCO 0.9901 (by hand 1.0000), 11 points 1.0000 (by hand 1.0000)
half of the lesions: COCO 0.4950 (by hand 0.5050), 11 points 0.5455 (by hand 0.5455)
every second box false: COCO 0.6007 (by hand 0.6105), 11 points 0.6387 (by hand 0.6387)
all false first: COCO 0.4950 (by hand 0.5000), 11 points 0.5000 (by hand 0.5000)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from detmet import DetMetric


def by_hand(recall, precision, levels):
    return np.mean([precision[recall >= level].max(initial=0.0) for level in levels])


for name, hits in (('perfect', [1] * 10), ('half of the lesions', [1] * 5), ('every second box false', [1, 0] * 10),
                   ('all false first', [0] * 10 + [1] * 10)):
    hits = np.array(hits)
    recall, precision = np.cumsum(hits) / 10, np.cumsum(hits) / np.arange(1, len(hits) + 1)
    print(f'{name}: COCO {DetMetric.COCOInterpolatedAP(recall, precision)[0]:.4f} '
          f'(by hand {by_hand(recall, precision, np.linspace(0, 1, 101)):.4f}), '
          f'11 points {DetMetric.ElevenPointInterpolatedAP(recall, precision)[0]:.4f} '
          f'(by hand {by_hand(recall, precision, np.linspace(0, 1, 11)):.4f})')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

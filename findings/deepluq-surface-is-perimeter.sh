#!/usr/bin/env bash
# The prediction surface of deepluq is a sum of perimeters where areas are documented: boxes that spread twice as
# far have twice the surface, not four times.
#
# Packages: deepluq 0.1.5, torch 2.13.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: calcu_prediction_surface "by calculating convex hull areas" adds up the attribute area of SciPy's
#   hulls, which for points in a plane is the perimeter; the area is called volume there. A spread along a line
#   of any width therefore counts nearly as much as one over a square.
# Expected: four times the area of the corners' hull, for boxes of equal size.
# Why it matters here: the number ranks the detections by how unsure the model is.
# Instead: the attribute volume of the hulls that it keeps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'deepluq==0.1.5'
cat > expected.txt <<'EXPECTED'
corners within 10 x 10: deepluq 160.0, four areas 400.0, four perimeters 160.0, volumes of its hulls 400.0
corners within 20 x 20: deepluq 320.0, four areas 1600.0, four perimeters 320.0, volumes of its hulls 1600.0
corners within 40 x 40: deepluq 640.0, four areas 6400.0, four perimeters 640.0, volumes of its hulls 6400.0
corners within 39.9 x 0.1: deepluq 320.0, four areas 16.0, four perimeters 320.0, volumes of its hulls 16.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from deepluq.metrics_dl import DLMetrics

for width, height in ((10, 10), (20, 20), (40, 40), (39.9, 0.1)):
    corners = [(x, y) for x in (0, width) for y in (0, height)]
    boxes = np.array([[x, y, x + 100, y + 100] for x, y in corners])
    metrics = DLMetrics()
    with contextlib.redirect_stdout(io.StringIO()):
        surface = metrics.calcu_prediction_surface(boxes)
    print(f'corners within {width} x {height}: deepluq {surface:.1f}, four areas {4 * width * height:.1f}, '
          f'four perimeters {8 * (width + height):.1f}, volumes of its hulls '
          f'{sum(hull.volume for hull in metrics.hull):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

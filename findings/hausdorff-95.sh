#!/usr/bin/env bash
# Two packages give one segmentation a Hausdorff distance of 95 % of 0 or 23 mm.
#
# Packages: medpy 0.5.2, surface-distance-based-measures 0.1, SimpleITK 2.5.7, scipy 1.17.1, numpy
#   2.2.6.
# Behaviour: the plain distance is the larger of two: from the found surface to the true one, and
#   back. surface-distance takes 95 % of each and then the larger. medpy puts the distances of both
#   ways into one list and takes 95 % of that, as seg-metrics does, so that a false lesion with less
#   than 5 % of both surfaces together counts nothing; its share of the found surface alone is above
#   5 %.
# Expected: one number. By the definition of the plain distance it is the larger of the two
#   directions.
# Why it matters here: the number is the usual second score beside Dice, and small false lesions are
#   what it is to show. Scores of two papers cannot be compared.
# Instead: say which one it is, and score lesions one by one.
# Source: Podobnik and Vrtovec, arXiv:2410.02630, which compares eleven packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.17.1' 'SimpleITK==2.5.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'medpy==0.5.2' 'surface-distance-based-measures==0.1'
cat > expected.txt <<'EXPECTED'
the organ and a false lesion: medpy 0 mm, surface-distance 23 mm, Hausdorff distance 30 mm
half of the organ: medpy 20 mm, surface-distance 20 mm, Hausdorff distance 20 mm
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import surface_distance
from medpy.metric.binary import hd95

organ = np.zeros((80, 40, 40), bool)
organ[5:45, 5:35, 5:35] = True
lesion = organ.copy()
lesion[65:75, 15:25, 15:25] = True  # a false lesion, 20 mm away
half = organ.copy()
half[25:] = False  # half of the organ is not found
for name, found in {'the organ and a false lesion': lesion, 'half of the organ': half}.items():
    distances = surface_distance.compute_surface_distances(organ, found, (1.0, 1.0, 1.0))
    print(f'{name}: medpy {hd95(found, organ):.0f} mm,',
          f'surface-distance {surface_distance.compute_robust_hausdorff(distances, 95):.0f} mm,',
          f'Hausdorff distance {surface_distance.compute_robust_hausdorff(distances, 100):.0f} mm')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

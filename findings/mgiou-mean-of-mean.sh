#!/usr/bin/env bash
# The mean loss of mgiou for boxes in the plane is divided by the batch size twice: 64 equal pairs of boxes
# have 1/64 of the loss of one pair.
#
# Packages: mgiou 0.1.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: MGIoU2D reduces the losses and divides the result by the number of boxes, also where the
#   reduction is a mean, its default, or none. With 'sum' the mean comes out. The other classes of the
#   package return means and sums.
# Expected: the same mean for one pair and for 64 equal ones; the learning rate need not grow with the
#   batch.
# Instead: reduction='sum'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mgiou==0.1.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
by hand: 0.1667
mean of 1 equal pairs: MGIoU2D 0.1667, MGIoU2DPlus 0.1667
mean of 4 equal pairs: MGIoU2D 0.0417, MGIoU2DPlus 0.1667
mean of 64 equal pairs: MGIoU2D 0.0026, MGIoU2DPlus 0.1667
sum of 1 equal pairs: MGIoU2D 0.1667, MGIoU2DPlus 0.1667
sum of 4 equal pairs: MGIoU2D 0.1667, MGIoU2DPlus 0.6667
sum of 64 equal pairs: MGIoU2D 0.1667, MGIoU2DPlus 10.6667
none of 1 equal pairs: MGIoU2D 0.1667, MGIoU2DPlus 0.1667
none of 4 equal pairs: MGIoU2D 0.0417, MGIoU2DPlus 0.1667
none of 64 equal pairs: MGIoU2D 0.0026, MGIoU2DPlus 0.1667
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from mgiou import MGIoU2D, MGIoU2DPlus

corners = torch.tensor([[[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]]])
moved = corners + torch.tensor([1.0, 0.0])
# The intervals overlap by 1 of 3 along x and are equal along y: a mean of 1/3 and 1, and a loss of (1 - 2/3) / 2.
print(f'by hand: {(1 - (1 / 3 + 1) / 2) / 2:.4f}')
for reduction in ('mean', 'sum', 'none'):
    for batch in (1, 4, 64):
        pair = corners.repeat(batch, 1, 1), moved.repeat(batch, 1, 1)
        plane, other = (loss(*pair) for loss in (MGIoU2D('corner', reduction), MGIoU2DPlus(reduction=reduction)))
        print(f'{reduction} of {batch} equal pairs: MGIoU2D {plane.flatten()[0].item():.4f}, '
              f'MGIoU2DPlus {other.flatten()[0].item():.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

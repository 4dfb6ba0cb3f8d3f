#!/usr/bin/env bash
# torchio's Resize gives each image as many slices as the first one had where -1 asks it to keep them: a
# scan of 40 slices loses half of them after a scan of 20.
#
# Packages: torchio 1.2.1, torch 2.13.0, numpy 2.4.6, SimpleITK 2.5.7, nibabel 5.4.2.
# Behaviour: "The size of dimensions set to -1 will be kept". The transform writes the size that it found in
#   the first image over the -1 of its own setting, and resamples each later image to that size. The
#   spacing is changed to match, so nothing looks wrong. The result of an image depends on the order of a
#   data set and, with several workers, on the worker that loads it.
# Expected: 40 slices for 40.
# Why it matters here: a lesion of one slice has half its brightness, and the record of a patient depends on
#   another patient, whose order in the epoch is drawn.
# Instead: a new Resize for each image, or Resample with a spacing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torchio==1.2.1' 'torch==2.13.0' 'numpy==2.4.6' 'SimpleITK==2.5.7' 'nibabel==5.4.2'
cat > expected.txt <<'EXPECTED'
scans of (20, 40, 10) slices, Resize((32, 32, -1)):
  20 slices of 1 mm with a lesion of brightness 1: now 20 slices of 1.0 mm, lesion 1.00
  40 slices of 1 mm with a lesion of brightness 1: now 20 slices of 2.0 mm, lesion 0.50
  10 slices of 1 mm with a lesion of brightness 1: now 20 slices of 0.5 mm, lesion 1.00
scans of (40, 20, 10) slices, Resize((32, 32, -1)):
  40 slices of 1 mm with a lesion of brightness 1: now 40 slices of 1.0 mm, lesion 1.00
  20 slices of 1 mm with a lesion of brightness 1: now 40 slices of 0.5 mm, lesion 0.75
  10 slices of 1 mm with a lesion of brightness 1: now 40 slices of 0.25 mm, lesion 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
import torchio as tio


def make_scan(slices):
    scan = torch.zeros(1, 64, 64, slices)
    scan[..., 1::4] = 1  # a lesion in each fourth slice
    return tio.ScalarImage(tensor=scan)


for order in ((20, 40, 10), (40, 20, 10)):
    resize = tio.Resize((32, 32, -1))
    print(f'scans of {order} slices, Resize((32, 32, -1)):')
    for slices in order:
        kept = resize(make_scan(slices))
        print(f'  {slices} slices of 1 mm with a lesion of brightness 1: now {kept.shape[-1]} slices of '
              f'{kept.spacing[-1]} mm, lesion {kept.data.max():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

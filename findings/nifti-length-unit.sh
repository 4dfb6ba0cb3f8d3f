#!/usr/bin/env bash
# nibabel ignores the units of lengths and times that a NIfTI header states; SimpleITK converts
# them.
#
# Packages: nibabel 5.4.2, SimpleITK 2.5.7, numpy 2.4.6.
# Behaviour: NIfTI states one unit for the voxels (metre, millimetre, micrometre) and one for the
#   time step. get_zooms and affine of nibabel are the numbers of the file. SimpleITK returns
#   millimetres and seconds, so that the volumes of one file differ by 1e9.
# Expected: both readers in the coordinates that both document, millimetres.
# Instead: with nibabel, read header.get_xyzt_units(), and scale zooms and affine by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'nibabel==5.4.2' 'SimpleITK==2.5.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
mm: nibabel voxel 0.125, SimpleITK voxel 0.125; step in time 2000, 2
micron: nibabel voxel 1.25e+08, SimpleITK voxel 0.125; step in time 2000, 2
meter: nibabel voxel 1.25e-10, SimpleITK voxel 0.125; step in time 2000, 2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import nibabel
import numpy as np
import SimpleITK

for unit, edge in (('mm', 0.5), ('micron', 500.0), ('meter', 0.0005)):
    image = nibabel.Nifti1Image(np.ones((10, 10, 10, 3), np.int16), np.diag([edge, edge, edge, 1]))
    image.header.set_zooms((edge, edge, edge, 2000.0))
    image.header.set_xyzt_units(unit, 'msec')
    nibabel.save(image, 'image.nii')
    read = nibabel.load('image.nii')
    other = SimpleITK.ReadImage('image.nii')
    print(
        f'{unit}: nibabel voxel {np.prod(read.header.get_zooms()[:3]):g},',
        f'SimpleITK voxel {np.prod(other.GetSpacing()[:3]):g};',
        f'step in time {read.header.get_zooms()[3]:g}, {other.GetSpacing()[3]:g}',
    )
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# nibabel spreads the labels of a mask over all codes of an integer header; a cast back loses some.
#
# Packages: nibabel 5.4.2, numpy 2.4.6.
# Behaviour: float values saved under an integer data type are scaled to its whole range. Labels
#   0, 1, 2 in uint8 come back as 0, 0.996, 2.000, and astype('uint8') makes label 1 the background.
#   It depends on the largest label: 0 to 3 survives, 0 to 2 and 0 to 4 do not.
# Expected: whole numbers that fit the data type are stored as they are.
# Instead: cast the mask to the integer type before it is saved; round before a cast on reading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'nibabel==5.4.2' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
2 cast [0, 0, 2] rounded [0, 1, 2]
3 cast [0, 1, 2, 3] rounded [0, 1, 2, 3]
4 cast [0, 1, 1, 2, 4] rounded [0, 1, 2, 3, 4]
5 cast [0, 1, 2, 3, 4, 5] rounded [0, 1, 2, 3, 4, 5]
6 cast [0, 0, 2, 2, 4, 4, 6] rounded [0, 1, 2, 3, 4, 5, 6]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import nibabel as nib
import numpy as np

for largest in (2, 3, 4, 5, 6):
    labels = np.arange(largest + 1, dtype=np.float64).reshape(-1, 1, 1)
    header = nib.Nifti1Header()
    header.set_data_dtype(np.uint8)
    nib.save(nib.Nifti1Image(labels, np.eye(4), header), 'mask.nii')
    read = nib.load('mask.nii').get_fdata()
    print(largest, 'cast', read.astype(np.uint8).ravel().tolist(), 'rounded', read.round().astype(int).ravel().tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

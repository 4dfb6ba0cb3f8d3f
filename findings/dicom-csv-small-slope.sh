#!/usr/bin/env bash
# dicom-csv rounds the rescale slope of a DICOM image to half precision, and multiplies in the type
# of the pixels.
#
# Packages: dicom_csv 0.5.1, pydicom 3.0.2, numpy 2.4.6, pandas 3.1.1.
# Behaviour: get_image gives the slope and the intercept the smallest type that numpy names for
#   them. For decimals it is float16, which has three digits and ends at 6e-8: a slope of 1e-8 is 0,
#   and one of 3.1e-8 is 6e-8. For whole slopes it is an 8 bit type, and the product keeps the type
#   of the pixels: 30000 times 2 is -5536.
# Expected: stored value times slope plus intercept in double precision, as pydicom computes it.
# Why it matters here: slopes of PET change from slice to slice, and those of maps with physical
#   units are tiny; an image of 0 or of doubled values looks like an image.
# Instead: pydicom.pixels.apply_rescale.
# Source: DICOM PS3.3, Modality LUT: output units = m × SV + b.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dicom_csv==0.5.1' 'pydicom==3.0.2' 'numpy==2.4.6' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
PET, slope 0.3758254: dicom-csv 37.573 375.73 7514.6 11272; pydicom 37.583 375.83 7516.5 11275
PET, whole, slope 2: dicom-csv 200 2000 -25536 -5536; pydicom 200 2000 40000 60000
diffusion, m2/s, slope 0.000000031: dicom-csv 5.9605e-06 5.9605e-05 0.0011921 0.0017881; pydicom 3.1e-06 3.1e-05 0.00062 0.00093
diffusion, mm2/us, slope 0.00000001: dicom-csv 0 0 0 0; pydicom 1e-06 1e-05 0.0002 0.0003
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from dicom_csv.misc import get_image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.pixels import apply_rescale
from pydicom.uid import ExplicitVRLittleEndian

stored = np.array([[100, 1000], [20000, 30000]], dtype=np.int16)
image = Dataset()
image.file_meta = FileMetaDataset()
image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
image.Rows = image.Columns = 2
image.SamplesPerPixel, image.PhotometricInterpretation = 1, 'MONOCHROME2'
image.BitsAllocated = image.BitsStored = 16
image.HighBit, image.PixelRepresentation = 15, 1
image.PixelData = stored.tobytes()
for name, slope in (('PET', '0.3758254'), ('PET, whole', '2'), ('diffusion, m2/s', '0.000000031'),
                    ('diffusion, mm2/us', '0.00000001')):
    image.RescaleSlope, image.RescaleIntercept = slope, '0'
    read = ' '.join(f'{value:.5g}' for value in get_image(image).ravel().astype(float))
    right = ' '.join(f'{value:.5g}' for value in apply_rescale(stored, image).ravel())
    print(f'{name}, slope {slope}: dicom-csv {read}; pydicom {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

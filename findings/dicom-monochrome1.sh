#!/usr/bin/env bash
# SimpleITK inverts a MONOCHROME1 image while reading it, and still reports MONOCHROME1.
#
# Packages: pydicom 3.0.2, SimpleITK 2.5.7, numpy 2.4.6.
# Behaviour: pydicom returns the stored values (0 is white in MONOCHROME1). SimpleITK returns
#   4095 - value for a 12-bit image, and its metadata keep the old tag, so a program that corrects
#   by the tag inverts a second time. Data sets read by both libraries hold two kinds of images.
# Expected: stored values, or a tag that says MONOCHROME2 after the inversion.
# Instead: read all images of a study with one library; compare one known image.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pydicom==3.0.2' 'SimpleITK==2.5.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
pydicom MONOCHROME1 [[0, 100], [2000, 4095]]
SimpleITK MONOCHROME1 [[4095, 3995], [2095, 0]]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pydicom
import SimpleITK
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian

image = Dataset()
image.file_meta = FileMetaDataset()
image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
image.file_meta.MediaStorageSOPClassUID = DigitalXRayImageStorageForPresentation
image.file_meta.MediaStorageSOPInstanceUID = '1.2.3.4'
image.SOPClassUID = DigitalXRayImageStorageForPresentation
image.SOPInstanceUID = '1.2.3.4'
image.Modality, image.PatientID = 'DX', 'A'
image.Rows = image.Columns = 2
image.SamplesPerPixel, image.PhotometricInterpretation = 1, 'MONOCHROME1'
image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 16, 12, 11, 0
image.PixelData = np.array([[0, 100], [2000, 4095]], np.uint16).tobytes()
image.save_as('chest.dcm', enforce_file_format=True)
read = pydicom.dcmread('chest.dcm')
print('pydicom', read.PhotometricInterpretation, read.pixel_array.tolist())
read = SimpleITK.ReadImage('chest.dcm')
tag = read.GetMetaData('0028|0004').strip()
print('SimpleITK', tag, SimpleITK.GetArrayFromImage(read)[0].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

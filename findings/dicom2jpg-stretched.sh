#!/usr/bin/env bash
# dicom2jpg shows one tissue black, grey or white, by what else is in the slice.
#
# Packages: dicom2jpg 0.1.10, pydicom 3.0.2, opencv-python-headless 5.0.0.93, numpy 2.4.6.
# Behaviour: the values are cut at the window of the file, and the smallest and largest of what is
#   left become 0 and 255. Where a slice does not fill the window, its contrast is stretched. Liver
#   of 60 Hounsfield units is 255 beside water, 0 beside bone, and 140, as the window says, beside
#   both air and bone.
# Expected: 140 for all three; the documentation says that the files look as on a DICOM viewer.
# Why it matters here: grey values are the features, and a model learns from the neighbours of an
#   organ.
# Instead: apply_voi_lut of pydicom and the window's own limits; the same limits for all images.
# Source: DICOM PS3.3, C.11.2.1.2, Window Center and Window Width.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pydicom==3.0.2' 'numpy==2.4.6' 'opencv-python-headless==5.0.0.93'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dicom2jpg==0.1.10'
cat > expected.txt <<'EXPECTED'
liver and water [60, 0]: window [140, 102], dicom2jpg [255, 0]
liver and bone [60, 200]: window [140, 230], dicom2jpg [0, 255]
liver, air, bone [60, -1000, 1000]: window [140, 0, 255], dicom2jpg [140, 0, 255]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io

import numpy as np
from dicom2jpg import io2img
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid


def slice_of(values):  # Hounsfield units; the window is -160 to 240
    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = CTImageStorage
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    data.Rows, data.Columns, data.SamplesPerPixel = 1, len(values), 1
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 0
    data.PhotometricInterpretation = 'MONOCHROME2'
    data.RescaleSlope, data.RescaleIntercept, data.WindowCenter, data.WindowWidth = 1, -1024, 40, 400
    data.PixelData = (np.array(values) + 1024).astype('<u2').tobytes()
    data['PixelData'].VR = 'OW'
    return data


slices = {'liver and water': [60, 0], 'liver and bone': [60, 200], 'liver, air, bone': [60, -1000, 1000]}
for name, values in slices.items():
    file = io.BytesIO()
    slice_of(values).save_as(file, enforce_file_format=True)
    file.seek(0)
    window = [round(255 * min(max((value + 160) / 400, 0), 1)) for value in values]
    print(f'{name} {values}: window {window}, dicom2jpg {io2img(file)[0].tolist()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

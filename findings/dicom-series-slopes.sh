#!/usr/bin/env bash
# SimpleITK truncates the values of a DICOM series whose first slice has a whole rescale slope.
#
# Packages: SimpleITK 2.5.7; pydicom 3.0.2 writes the files; numpy 2.4.6.
# Behaviour: each slice of a PET series has a rescale slope of its own. The reader of a series takes
#   the type of its pixels from the first file: with the slope 1 that is an integer, and the other
#   slices, scaled by their own slopes, lose their decimals. No warning; the order of the files
#   decides.
# Expected: floating point numbers, as the same slices have where each is read by itself.
# Instead: SimpleITK.ReadImage(files, SimpleITK.sitkFloat64).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'SimpleITK==2.5.7' 'pydicom==3.0.2' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
slopes 1 0.4 2.5
  slice by slice [[0.0, 1.0, 2.0, 3.0], [0.0, 0.4, 0.8, 1.2], [0.0, 2.5, 5.0, 7.5]]
  as a series uint16 [[0, 1, 2, 3], [0, 0, 0, 1], [0, 2, 5, 7]]
slopes 2.5 0.4 1
  slice by slice [[0.0, 2.5, 5.0, 7.5], [0.0, 0.4, 0.8, 1.2], [0.0, 1.0, 2.0, 3.0]]
  as a series float64 [[0.0, 2.5, 5.0, 7.5], [0.0, 0.4, 0.8, 1.2], [0.0, 1.0, 2.0, 3.0]]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pydicom
import SimpleITK
from pydicom.uid import ExplicitVRLittleEndian, PositronEmissionTomographyImageStorage


def write(place, slope):
    image = pydicom.Dataset()
    image.SOPClassUID = PositronEmissionTomographyImageStorage
    image.SOPInstanceUID = f'1.2.3.{place + 1}'
    image.StudyInstanceUID, image.SeriesInstanceUID = '1.2.4', '1.2.5'
    image.Modality, image.PatientID, image.InstanceNumber = 'PT', 'P1', place + 1
    image.Rows, image.Columns, image.SamplesPerPixel = 2, 4, 1
    image.PhotometricInterpretation = 'MONOCHROME2'
    image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 16, 16, 15, 0
    image.RescaleIntercept, image.RescaleSlope, image.Units = '0', slope, 'BQML'
    image.ImagePositionPatient, image.ImageOrientationPatient = [0, 0, 2 * place], [1, 0, 0, 0, 1, 0]
    image.PixelSpacing, image.SliceThickness = [2, 2], '2'
    image.PixelData = np.array([0, 1, 2, 3] * 2, '<u2').tobytes()
    image.file_meta = pydicom.dataset.FileMetaDataset()
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image.save_as(f'{place}.dcm', enforce_file_format=True)


for slopes in (('1', '0.4', '2.5'), ('2.5', '0.4', '1')):
    for place, slope in enumerate(slopes):
        write(place, slope)
    files = [f'{place}.dcm' for place in range(3)]
    series = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(files))[:, 0]
    slices = [SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(file))[0, 0] for file in files]
    print('slopes', *slopes)
    print('  slice by slice', np.round(slices, 2).tolist())
    print('  as a series', series.dtype, np.round(series, 2).tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pysuv ignores the dates of injection and scan, and takes the time of a series for the time of the scan:
# uptake three days after an injection is half the right one, and a later reconstruction has 45 % more.
#
# Packages: pysuv 0.1.0, pydicom 3.0.1, numpy 2.2.6.
# Behaviour: it subtracts two times of day, and adds a day where the result is negative. Zirconium-89 and
#   copper-64 are scanned days after the injection, so the decay of whole days is missing. The Series
#   Time of a reconstruction that was made later is later than the acquisition, whose time is beside it.
# Expected: the decay from RadiopharmaceuticalStartDateTime to the earlier of series and acquisition, as
#   in the vendor-neutral pseudo-code of QIBA.
# Why it matters here: a threshold such as an uptake of 4 decides about a lesion, and one hospital that
#   reconstructs later looks sicker.
# Instead: compute the decay from dates and AcquisitionTime, as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pydicom==3.0.1' 'pysuv==0.1.0'
cat > expected.txt <<'EXPECTED'
fluorine-18, an hour after injection: uptake 1.46, by the dates 1.46
fluorine-18, reconstructed an hour later: uptake 2.13, by the dates 1.46
copper-64, a day after injection: uptake 1.03, by the dates 3.81
zirconium-89, three days after injection: uptake 1.00, by the dates 1.90
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime, timedelta

import numpy as np
import pysuv
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian


def image(half_life, injected, acquired, series):
    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.Modality, data.Units, data.DecayCorrection = 'PT', 'BQML', 'START'
    data.CorrectedImage = ['DECY', 'ATTN']
    data.PatientWeight, data.RescaleSlope, data.RescaleIntercept = 70, 1, 0
    data.AcquisitionDate, data.AcquisitionTime = acquired.strftime('%Y%m%d'), acquired.strftime('%H%M%S')
    data.SeriesDate, data.SeriesTime = series.strftime('%Y%m%d'), series.strftime('%H%M%S')
    tracer = Dataset()
    tracer.RadionuclideTotalDose, tracer.RadionuclideHalfLife = 70e6, half_life
    tracer.RadiopharmaceuticalStartTime = injected.strftime('%H%M%S')
    tracer.RadiopharmaceuticalStartDateTime = injected.strftime('%Y%m%d%H%M%S')
    data.RadiopharmaceuticalInformationSequence = [tracer]
    data.Rows = data.Columns = 2
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit, data.PixelRepresentation, data.SamplesPerPixel = 15, 0, 1
    data.PhotometricInterpretation = 'MONOCHROME2'
    data.PixelData = np.full((2, 2), 1000, dtype='<u2').tobytes()
    return data


noon = datetime(2026, 3, 2, 12)
for name, half_life, wait, later in (
    ('fluorine-18, an hour after injection', 6586.2, 1, 0),
    ('fluorine-18, reconstructed an hour later', 6586.2, 1, 1),
    ('copper-64, a day after injection', 45720, 24.5, 0),
    ('zirconium-89, three days after injection', 282240, 72.5, 0),
):
    acquired = noon + timedelta(hours=wait)
    seen = pysuv.compute_suv(image(half_life, noon, acquired, acquired + timedelta(hours=later))).max()
    right = 1000 * 70e3 / (70e6 * 0.5 ** (wait * 3600 / half_life))
    print(f'{name}: uptake {seen:.2f}, by the dates {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# mne takes a unit that it does not know for volts, and a table of it for microvolts.
#
# Packages: mne 1.13.2, pyedflib 0.1.42 (writes the file), pandas 3.1.1, numpy 2.4.6.
# Behaviour: a glucose channel of 120 mg/dL in an EDF file is read as 120 V, its channel
#   information says volts, and to_data_frame() shows 120,000,000. The true unit survives only in
#   the file.
# Expected: the number in the file's unit, with that unit.
# Instead: read such channels with pyedflib, which returns 120 and mg/dL.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mne==1.13.2' 'pyedflib==0.1.42' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
pyedflib 120 mg/dL
mne 120 107 (FIFF_UNIT_V) {'Glucose': 'n/a'}
table 120000000.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mne
import numpy as np
import pyedflib

writer = pyedflib.EdfWriter('visit.edf', 1, file_type=pyedflib.FILETYPE_EDF)
writer.setSignalHeader(0, {
    'label': 'Glucose', 'dimension': 'mg/dL', 'sample_frequency': 10, 'physical_max': 500,
    'physical_min': 0, 'digital_max': 32767, 'digital_min': -32768, 'transducer': '', 'prefilter': '',
})
writer.writeSamples([np.full(100, 120.0)])
writer.close()
with pyedflib.EdfReader('visit.edf') as reader:
    print('pyedflib', round(reader.readSignal(0)[0]), reader.getPhysicalDimension(0))
raw = mne.io.read_raw_edf('visit.edf', verbose='error', preload=True)
print('mne', round(raw.get_data()[0, 0]), raw.info['chs'][0]['unit'], raw._orig_units)
print('table', round(raw.to_data_frame()['Glucose'][0], -4))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

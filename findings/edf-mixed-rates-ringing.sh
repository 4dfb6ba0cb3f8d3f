#!/usr/bin/env bash
# mne brings the slow signals of an EDF file to the highest rate, so that a saturation swings below 0.
#
# Packages: mne 1.13.2, pyedflib 0.1.42 (writes the file), numpy 2.4.6.
# Behaviour: an oxygen saturation at 10 Hz that goes from 0 (no finger) to 40 % beside an EEG at 256 Hz
#   is resampled through its spectrum when the file is loaded. It then holds values from -5.6 to 45.6,
#   none of which the device gave; the sleep stages of a hypnogram become fractions. The document of
#   read_raw_edf speaks of resampling; nothing is shown for a file.
# Expected: the last value held, or the signal at its own rate.
# Instead: read slow signals with pyedflib, or with include= and exclude= one rate at a time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mne==1.13.2' 'pyedflib==0.1.42' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
written: 0 to 40
alone: 0 to 40
beside the EEG: -5.65 to 45.6
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mne
import numpy as np
import pyedflib

signals = (('SpO2', '%', 100, 10, np.repeat([0.0, 40.0], 50)), ('EEG', 'uV', 100, 256, np.zeros(2560)))
writer = pyedflib.EdfWriter('night.edf', 2, file_type=pyedflib.FILETYPE_EDF)
for number, (name, unit, top, rate, _) in enumerate(signals):
    writer.setSignalHeader(number, {
        'label': name, 'dimension': unit, 'sample_frequency': rate, 'physical_max': top,
        'physical_min': 0 if unit == '%' else -top, 'digital_max': 32767, 'digital_min': -32768,
        'transducer': '', 'prefilter': '',
    })
writer.writeSamples([signal for *_, signal in signals])
writer.close()
print('written: 0 to 40')
for name, left_out in (('alone', ['EEG']), ('beside the EEG', [])):
    raw = mne.io.read_raw_edf('night.edf', exclude=left_out, preload=True, verbose='error')
    values = raw.get_data(picks=['SpO2'])[0]
    print(f'{name}: {values.min():.3g} to {values.max():.3g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

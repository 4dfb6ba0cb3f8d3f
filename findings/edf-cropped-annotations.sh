#!/usr/bin/env bash
# pyedflib loses all annotations of a recording that it crops.
#
# Packages: pyedflib 0.1.42, numpy 2.4.6.
# Behaviour: highlevel.crop_edf writes the samples between start and stop, the header and the new
#   starting time, and no annotation, also where the whole recording is kept. It reports success.
#   drop_channels, rename_channels and anonymize_edf of the same module keep the annotations.
# Expected: the annotations between start and stop, moved to the new start, or a word that they are lost.
# Why it matters here: seizures and stages of sleep are annotations; a cropped recording with a seizure
#   is read as one without.
# Instead: read_edf, crop the samples and header['annotations'], and write_edf.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyedflib==0.1.42' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
Original: 2020-01-02 00:00:00 to 2020-01-02 00:00:20 (0:00:20)
Truncated: 2020-01-02 00:00:05 to 2020-01-02 00:00:15 (0:00:10)
Succesfully written file: cropped.edf
night: 200 samples, annotations [(1.5, 'lights off'), (7.25, 'seizure')]
dropped: 200 samples, annotations [(1.5, 'lights off'), (7.25, 'seizure')]
renamed: 200 samples, annotations [(1.5, 'lights off'), (7.25, 'seizure')]
anonymous: 200 samples, annotations [(1.5, 'lights off'), (7.25, 'seizure')]
cropped: 100 samples, annotations []
whole: 200 samples, annotations []
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime

import numpy as np
from pyedflib import highlevel

signals = np.tile(np.arange(200.0), (2, 1))
channels = [highlevel.make_signal_header(name, sample_frequency=10) for name in ('C3', 'C4')]
header = highlevel.make_header(patientname='X', startdate=datetime(2020, 1, 2))
header['annotations'] = [[1.5, 2.0, 'lights off'], [7.25, 3.0, 'seizure']]
highlevel.write_edf('night.edf', signals, channels, header)
highlevel.drop_channels('night.edf', 'dropped.edf', to_drop=['C4'])
highlevel.rename_channels('night.edf', {'C4': 'A1'}, 'renamed.edf')
highlevel.anonymize_edf('night.edf', 'anonymous.edf')
limits = {'start_format': 'seconds', 'stop_format': 'seconds'}
highlevel.crop_edf('night.edf', new_file='cropped.edf', start=5, stop=15, **limits)
highlevel.crop_edf('night.edf', new_file='whole.edf', start=0, stop=20, verbose=False, **limits)
for name in ('night', 'dropped', 'renamed', 'anonymous', 'cropped', 'whole'):
    samples, _, header = highlevel.read_edf(f'{name}.edf')
    print(f'{name}: {len(samples[0])} samples, annotations',
          [(float(start), str(text)) for start, _, text in header['annotations']])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

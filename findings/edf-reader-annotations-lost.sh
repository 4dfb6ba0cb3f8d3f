#!/usr/bin/env bash
# edf-reader finds no annotation in a file that is full of them.
#
# Packages: edf-reader 0.1.3, numpy 2.2.6, edfio 0.4.18 (writes the file, and reads it for comparison).
# Behaviour: an annotation of EDF+ is its onset, the byte 21 and its duration, then the byte 20 and its
#   text. edf-reader, which "handles annotations and discontinuities in EDF+D files", looks for byte 20
#   first: with a duration it cannot read the onset, without one it takes the text for the duration.
#   Each annotation is skipped as a problem, silently, and the list is empty for each file.
# Expected: a dose at 1.5 seconds, and a seizure of 2 seconds at 4.
# Instead: edfio.read_edf(path).annotations.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'edf-reader==0.1.3' 'numpy==2.2.6' 'edfio==0.4.18'
cat > expected.txt <<'EXPECTED'
edfio: 1.5 None dose
edfio: 4.0 2.0 seizure
edfio: 8.0 None end
edf-reader, EDF+C, 10 records: []
edf-reader, EDF+D, 10 records: []
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

import numpy as np
from edf_reader import EdfWrapper
from edfio import Edf, EdfAnnotation, EdfSignal, read_edf

signal = EdfSignal(np.sin(np.arange(1000) / 9), 100, label='EEG Fz', physical_range=(-1, 1))
notes = [EdfAnnotation(1.5, None, 'dose'), EdfAnnotation(4, 2, 'seizure'), EdfAnnotation(8, None, 'end')]
Edf([signal], annotations=notes, data_record_duration=1).write('continuous.edf')
data = pathlib.Path('continuous.edf').read_bytes().replace(b'EDF+C', b'EDF+D', 1)
pathlib.Path('interrupted.edf').write_bytes(data)
for note in read_edf('continuous.edf').annotations:
    print(f'edfio: {note.onset} {note.duration} {note.text}')
for name in ('continuous.edf', 'interrupted.edf'):
    reader = EdfWrapper(name)
    print(f"edf-reader, {reader.header['reserved']}, {len(reader.segment_markers)} records: {reader.annotations}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

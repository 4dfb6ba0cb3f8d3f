#!/usr/bin/env bash
# wfdb reads an EDF signal in raw codes where another signal of the file has a lower rate.
#
# Packages: wfdb 4.3.1, pyedflib 0.1.42 (writes the file, and reads it for comparison), numpy 2.4.6.
# Behaviour: an ECG of 100 uV at 250 Hz beside an oxygen saturation of 97 % at 10 Hz, as bedside
#   monitors store them. read_edf averages the 25 samples of a frame, without offset and gain, so
#   the ECG is 1637, labelled uV. The slow signal is right. With equal rates both are right.
# Expected: 100 uV, or all 250 samples a second.
# Instead: read EDF files with pyedflib or edfio.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'wfdb==4.3.1' 'pyedflib==0.1.42' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
rates 250 and 250: read_edf 99.9 uV 97.0 %, pyedflib 99.9 97.0
rates 250 and 10: read_edf 1637.0 uV 97.0 %, pyedflib 99.9 97.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pyedflib
from wfdb.io.convert.edf import read_edf

for rate in (250, 10):
    writer = pyedflib.EdfWriter('visit.edf', 2, file_type=pyedflib.FILETYPE_EDF)
    for number, (name, unit, top, samples) in enumerate(
        (('ECG', 'uV', 2000, 250), ('SpO2', '%', 200, rate))
    ):
        writer.setSignalHeader(number, {
            'label': name, 'dimension': unit, 'sample_frequency': samples, 'physical_max': top,
            'physical_min': -top, 'digital_max': 32767, 'digital_min': -32768, 'transducer': '',
            'prefilter': '',
        })
    writer.writeSamples([np.full(2500, 100.0), np.full(10 * rate, 97.0)])
    writer.close()
    with contextlib.redirect_stdout(io.StringIO()):
        record = read_edf('visit.edf')
    first = record.p_signal[0].round(1)
    with pyedflib.EdfReader('visit.edf') as reader:
        other = [reader.readSignal(number)[0].round(1) for number in (0, 1)]
    print(f'rates 250 and {rate}: read_edf {first[0]} {record.units[0]} {first[1]} {record.units[1]},',
          f'pyedflib {other[0]} {other[1]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pyedflib reads and writes the fraction of an EDF+ starting second wrong by a factor of ten, and mne
# leaves it out.
#
# Packages: pyedflib 0.1.42, edfio 0.4.18, mne 1.13.2, numpy 2.4.6.
# Behaviour: EDF+ keeps the fraction of the starting second in the first annotation of the file. Of
#   a start at .250 s pyedflib reads .025 and mne .000; edfio reads .250. A start of .050 s that
#   pyedflib writes is stored as .500, and one of .250 s is stored as .000. Two recorders that were
#   synchronised drift apart by up to a second, without a warning. pyedflib's repository has a
#   correction since July 2026 (pull request 315), which no release holds yet.
# Expected: the same fraction in each reader, and the stored one equal to the given one.
# Instead: read and write such starts with edfio, or keep the start time in a file of its own.
# Source: the EDF+ specification (edfplus.info), 2.2.4, on the time-keeping annotation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyedflib==0.1.42' 'edfio==0.4.18' 'mne==1.13.2' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
edfio writes 250000: edfio 250000, pyedflib 25000, mne 0
edfio writes 50000: edfio 50000, pyedflib 5000, mne 0
pyedflib writes 250000: edfio 0, pyedflib 0, mne 0
pyedflib writes 50000: edfio 500000, pyedflib 50000, mne 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import edfio
import mne
import numpy as np
import pyedflib


def write_edfio(start):
    signal = edfio.EdfSignal(
        np.zeros(256), 256, label='lead', physical_dimension='uV', physical_range=(-100, 100)
    )
    recording = edfio.Recording(startdate=start.date())
    edfio.Edf([signal], starttime=start.time(), recording=recording, annotations=[]).write('a.edf')


def write_pyedflib(start):
    writer = pyedflib.EdfWriter('a.edf', 1, file_type=pyedflib.FILETYPE_EDFPLUS)
    writer.setSignalHeader(0, {
        'label': 'lead', 'dimension': 'uV', 'sample_frequency': 256, 'physical_max': 100,
        'physical_min': -100, 'digital_max': 32767, 'digital_min': -32768, 'transducer': '',
        'prefilter': '',
    })
    writer.setStartdatetime(start)
    writer.writeSamples([np.zeros(256)])
    writer.close()


for name, write in (('edfio', write_edfio), ('pyedflib', write_pyedflib)):
    for fraction in (250_000, 50_000):
        write(datetime.datetime(2024, 1, 1, 1, 2, 3, fraction))
        with pyedflib.EdfReader('a.edf') as reader:
            by_pyedflib = reader.getStartdatetime().microsecond
        by_edfio = edfio.read_edf('a.edf').starttime.microsecond
        by_mne = mne.io.read_raw_edf('a.edf', verbose='error').info['meas_date'].microsecond
        print(f'{name} writes {fraction}: edfio {by_edfio}, pyedflib {by_pyedflib}, mne {by_mne}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# edfpy names a signal by the second word of its label, so that one of two signals replaces the other.
#
# Packages: edfpy 0.2.2, cached-property 2.0.1, numpy 2.2.6, edfio 0.4.18 (writes the file).
# Behaviour: labels of EDF begin with the kind of the signal, such as "EEG Fpz", and edfpy drops the first
#   word and whatever comes after the second. The sensors "Leg L" and "Arm L" are both L, "Temp skin chest"
#   and "Temp skin foot" both SKIN: reading gives one signal for each name, the last one, also to somebody
#   who asks for the first one by its label.
# Expected: 10 for the leg, and four signals.
# Instead: edfio, or labels whose second words differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'edfpy==0.2.2' 'cached-property==2.0.1' 'numpy==2.2.6' 'edfio==0.4.18'
cat > expected.txt <<'EXPECTED'
all signals: {'L': 20, 'SKIN': 28}
Leg L: 20, written 10
Arm L: 20, written 20
Temp skin chest: 28, written 35
Temp skin foot: 28, written 28
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from edfio import Edf, EdfSignal
from edfpy import Reader

means = {'Leg L': 10, 'Arm L': 20, 'Temp skin chest': 35, 'Temp skin foot': 28}
signals = [
    EdfSignal(np.full(1000, float(mean)), 100, label=label, physical_range=(0, 100))
    for label, mean in means.items()
]
Edf(signals, data_record_duration=1).write('sleep.edf')
reader = Reader.open('sleep.edf')
seen = reader.get_physical_samples()
print('all signals:', {str(name): round(values.mean()) for name, values in seen.items()})
for label, mean in means.items():
    for name, values in reader.get_physical_samples(labels=[label]).items():
        print(f'{label}: {round(values.mean())}, written {mean}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# ishneholterlib changes a Holter recording when it writes it: a second copy overflows, a first loses a unit.
#
# Packages: ishneholterlib 2020.5.29, crccheck 1.3.0, numpy 1.26.4.
# Behaviour: write_file multiplies the samples in memory by 1,000,000 by the resolution, in place. They
#   are whole numbers instead of millivolts afterwards, and a second file of the same object holds
#   them multiplied again, cut to 16 bits. The conversion to whole numbers cuts towards zero, so a
#   sample whose millivolts are a rounding error below a whole number is one lower in the first file.
# Expected: the recording is the same after writing, two files are equal, and a file that is read and
#   written has the samples that it had.
# Why it matters here: cutting and de-identifying recordings is what it is written with.
# Instead: a new Holter for each file, convert=False in load_data and convert_data=False in write_file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'crccheck==1.3.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ishneholterlib==2020.5.29'
cat > expected.txt <<'EXPECTED'
before writing: 0.288 mV at most
first file: 24% of the samples changed, last one 120 of 120; in memory 120.000
second file: 100% of the samples changed, last one -15536 of 120; in memory 50000.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime
import struct

import numpy as np
from ishneholterlib import Holter

samples = np.arange(-120, 121, dtype='<i2')
head = struct.pack('<iiii', 0, len(samples), 522, 522) + struct.pack('<h', 1) + bytes(100)
head += struct.pack('<hh', 2, 0) + struct.pack('<9h', 1, 5, 1960, 3, 2, 2026, 3, 2, 2026)
head += struct.pack('<3h', 14, 35, 50) + struct.pack('<h', 1)
head += struct.pack('<12h', 6, *[-9] * 11) + struct.pack('<12h', 1, *[-9] * 11)
head += struct.pack('<12h', 2400, *[-9] * 11) + struct.pack('<h', 0)
head += bytes(40) + struct.pack('<h', 200) + bytes(80 + 80 + 88)
with open('a.ecg', 'wb') as file:
    file.write(b'ISHNE1.0' + bytes(2) + head + samples.tobytes())


def stored(path):
    with open(path, 'rb') as file:
        return np.frombuffer(file.read()[522:], '<i2')


holter = Holter('a.ecg', check_valid=False)
holter.load_data()
print('before writing:', f'{holter.lead[0].data[-1]:.3f} mV at most')
for name in ('first', 'second'):
    for text in ('first_name', 'last_name', 'id', 'proprietary', 'copyright', 'reserved'):
        setattr(holter, text, '')
    holter.filename = f'{name}.ecg'
    holter.write_file()
    print(f'{name} file: {np.mean(stored(holter.filename) != samples):.0%} of the samples changed, last one',
          f'{stored(holter.filename)[-1]} of {samples[-1]}; in memory {holter.lead[0].data[-1]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

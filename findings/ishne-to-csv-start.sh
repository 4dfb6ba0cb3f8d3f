#!/usr/bin/env bash
# ishne-to-csv starts a Holter recording of 14:35:50 at 14:00:35, and drops the unit of its samples.
#
# Packages: ishne-to-csv 1.2, pandas 2.2.3, numpy 2.2.6, tqdm 4.67.1.
# Behaviour: an ISHNE file has the start as three 16-bit numbers. The reader takes three bytes and
#   skips the other three: the zero byte of the hour becomes the minute, and the minute the second.
#   Each time of the table, and the file of metadata, is up to an hour early. The resolution of the
#   leads, in nV, is skipped as well, so that the same heart is 200 or 1000 high.
# Expected: 14:35:50, and millivolts, or the resolution beside the samples.
# Why it matters here: a Holter is compared with a diary of symptoms and doses by the minute.
# Instead: read the start with struct '<3h' at byte 150, and the resolution with '<12h' at byte 206.
# Source: Badilini, The ISHNE Holter Standard Output File Format, 1998.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.6' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ishne-to-csv==1.2'
cat > expected.txt <<'EXPECTED'
written 14:35:50, read 14:00:35; written [0.0, 0.2, 1.0, 0.4] mV, read [0, 40, 200, 80]
written 09:59:59, read 09:00:59; written [0.0, 0.2, 1.0, 0.4] mV, read [0, 200, 1000, 400]
written 23:05:00, read 23:00:05; written [0.0, 0.2, 1.0, 0.4] mV, read [0, 200, 1000, 400]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import struct

from ishne_to_csv import ishne_to_csv
import json
import pandas as pd


def write(path, start, resolution, samples):
    head = struct.pack('<iiii', 0, len(samples), 522, 522) + struct.pack('<h', 1)
    head += b'Jane'.ljust(40, b'\0') + b'Doe'.ljust(40, b'\0') + b'1'.ljust(20, b'\0')
    head += struct.pack('<hh', 2, 0) + struct.pack('<9h', 1, 5, 1960, 3, 2, 2026, 3, 2, 2026)
    head += struct.pack('<3h', *start) + struct.pack('<h', 1)
    head += struct.pack('<12h', 6, *[-9] * 11) + struct.pack('<12h', 1, *[-9] * 11)
    head += struct.pack('<12h', resolution, *[-9] * 11) + struct.pack('<h', 0)
    head += b'analog'.ljust(40, b'\0') + struct.pack('<h', 200) + bytes(80 + 80 + 88)
    with open(path, 'wb') as file:
        file.write(b'ISHNE1.0' + bytes(2) + head + struct.pack(f'<{len(samples)}h', *samples))


for start, resolution in (((14, 35, 50), 5000), ((9, 59, 59), 1000), ((23, 5, 0), 1000)):
    millivolts = [0.0, 0.2, 1.0, 0.4]
    write('h.ecg', start, resolution, [round(value * 1e6 / resolution) for value in millivolts])
    ishne_to_csv('h.ecg', 'h.csv', 'h.json', verbose=False)
    with open('h.json') as file:
        seen = json.load(file)
    print('written {:02}:{:02}:{:02},'.format(*start), f'read {seen["Start Time"]}; written {millivolts} mV,',
          f'read {pd.read_csv("h.csv")["Lead_1"].tolist()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

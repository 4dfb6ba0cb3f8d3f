#!/usr/bin/env bash
# pyreadr reads dates that R stores as whole numbers as 1 January 1970, or as other dates of the
# table.
#
# Packages: pyreadr 0.5.8, rdata 1.1.0 (reads the stored numbers for comparison), pandas 2.3.3,
#   numpy 1.26.4.
# Behaviour: R keeps a date as a double or as an integer; data.table's IDate, and so fread, always
#   stores integers. pyreadr takes the bytes of such a column for doubles: the first half becomes
#   the start of 1970, the rest is what lay in memory, often dates of the column before. Times in
#   integer seconds (POSIXct) fare the same. No error, no warning.
# Expected: the dates that R shows, as for doubles.
# Instead: convert in R before saving (x$date <- as.Date(as.numeric(x$date))), or save as Parquet.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyreadr==0.5.8' 'rdata==1.1.0' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
Date stored as double: 2 of 2 dates right, the first is 2024-01-05
Date stored as integer: 0 of 2 dates right, the first is 1970-01-01
IDate stored as integer: 0 of 2 dates right, the first is 1970-01-01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime
import gzip
import struct

import pyreadr
import rdata

# The writer below lays out a data frame as R's saveRDS does (XDR, version 2), so R is not needed.
CODES = {'integer': 13, 'double': 14, 'text': 16, 'list': 19}


def text(value):
    return struct.pack('>ii', 9 | 1 << 18, len(value)) + value.encode()


def vector(kind, values, **attributes):
    is_object = 'class_' in attributes
    flags = (0x200 if attributes else 0) | (0x100 if is_object else 0)
    out = struct.pack('>ii', CODES[kind] | flags, len(values))
    if kind == 'list':
        out += b''.join(values)
    elif kind == 'text':
        out += b''.join(map(text, values))
    else:
        out += b''.join(struct.pack('>i' if kind == 'integer' else '>d', x) for x in values)
    for name, value in attributes.items():
        out += struct.pack('>ii', 0x402, 1) + text(name.strip('_').replace('_', '.')) + value
    return out + (struct.pack('>i', 254) if attributes else b'')


def save(columns):
    rows = vector('integer', [-(2**31), -2])
    frame = vector('list', list(columns.values()), names=vector('text', list(columns)),
                   row_names=rows, class_=vector('text', ['data.frame']))
    head = b'X\n' + struct.pack('>iii', 2, 0x00030600, 0x00020300)
    with open('visits.rds', 'wb') as file:
        file.write(gzip.compress(head + frame))


dates = [datetime.date(2024, 1, 5), datetime.date(2024, 2, 9)]
days = [(date - datetime.date(1970, 1, 1)).days for date in dates]
for kind, name, classes in (
    ('double', 'Date', ['Date']), ('integer', 'Date', ['Date']), ('integer', 'IDate', ['IDate', 'Date'])
):
    save({'visit': vector(kind, days, class_=vector('text', classes))})
    stored = [int(day) for day in rdata.read_rds('visits.rds')['visit']]
    assert stored == days
    read = list(pyreadr.read_r('visits.rds')[None]['visit'])
    right = sum(a == b for a, b in zip(read, dates))
    print(f'{name} stored as {kind}: {right} of 2 dates right, the first is {read[0]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pyreadr drops the unit of R's time differences, so follow-up in days, weeks and minutes looks the
# same.
#
# Packages: pyreadr 0.5.8, rdata 1.1.0, pandas 2.3.3, numpy 1.26.4.
# Behaviour: R's difftime keeps numbers and a unit beside them, and end - start chooses the unit by
#   the smallest difference of the column: minutes for an emergency ward, weeks or days for a
#   registry. pyreadr returns the numbers alone, and says nothing (rdata does too, with a warning).
#   Whole numbers of bit64 (integer64), as data.table's fread reads long ids, become numbers near
#   1e-311, which are 0 where they are made whole again.
# Expected: a Timedelta, or the unit as metadata, or an error for a class that is not known.
# Instead: as.numeric(x, units = 'days') and as.character(id) in R before saving.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyreadr==0.5.8' 'rdata==1.1.0' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
difftime of 6 and 26 mins: pyreadr [6.0, 26.0], rdata [6.0, 26.0]
difftime of 6 and 26 days: pyreadr [6.0, 26.0], rdata [6.0, 26.0]
difftime of 6 and 26 weeks: pyreadr [6.0, 26.0], rdata [6.0, 26.0]
integer64 ids 4943001234567 and 4943007654321: pyreadr [2.4421670973504e-311, 2.4421702691303e-311]
as whole numbers: [0, 0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import gzip
import struct

import pyreadr
import rdata

# The writer below lays out a data frame as R's saveRDS does (XDR, version 2), so R is not needed.
CODES = {'integer': 13, 'double': 14, 'integer64': 14, 'text': 16, 'list': 19}
FORMATS = {'integer': '>i', 'double': '>d', 'integer64': '>q'}


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
        out += b''.join(struct.pack(FORMATS[kind], x) for x in values)
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


for unit in ('mins', 'days', 'weeks'):
    save({'follow_up': vector('double', [6.0, 26.0], class_=vector('text', ['difftime']),
                              units=vector('text', [unit]))})
    numbers = pyreadr.read_r('visits.rds')[None]['follow_up'].tolist()
    other = rdata.read_rds('visits.rds')['follow_up'].tolist()
    print(f'difftime of 6 and 26 {unit}: pyreadr {numbers}, rdata {other}')
save({'id': vector('integer64', [4943001234567, 4943007654321], class_=vector('text', ['integer64']))})
numbers = pyreadr.read_r('visits.rds')[None]['id'].tolist()
print(f'integer64 ids 4943001234567 and 4943007654321: pyreadr {numbers}')
print('as whole numbers:', [int(number) for number in numbers])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

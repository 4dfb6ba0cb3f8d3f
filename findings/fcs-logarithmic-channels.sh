#!/usr/bin/env bash
# fcsparser returns the channel numbers of a flow cytometry file, whatever scale the file states.
#
# Packages: fcsparser 0.2.8, six 1.17.0 (which it imports and does not ask for), flowio 1.4.0 (reads
#   the file for comparison), numpy 1.26.4.
# Behaviour: an FCS file of whole numbers states for each parameter a gain ($PnG) or the decades of a
#   logarithmic amplifier ($PnE), and the unit of time ($TIMESTEP). Channel 512 of 1024 over four
#   decades is 100; fcsparser returns 512, a gain of 2 is not divided by, and the time is in steps.
#   Files of old and new cytometers of one hospital then differ by a logarithm in one column.
# Expected: the values on the scale of the file, as flowio gives them, or a word about channels.
# Instead: flowio's as_array(preprocess=True).
# Source: FCS 3.0 and 3.1, keywords $PnE, $PnG and $TIMESTEP.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fcsparser==0.2.8' 'six==1.17.0' 'flowio==1.4.0' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
fcsparser [512.0, 512.0, 100.0]
flowio [256.0, 100.0, 1.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import struct

import fcsparser
import flowio

events = [(512, 512, 100), (1023, 1023, 200)]
data = b''.join(struct.pack('<3H', *event) for event in events)
keys = {
    '$BEGINANALYSIS': '0', '$ENDANALYSIS': '0', '$BEGINSTEXT': '0', '$ENDSTEXT': '0',
    '$BYTEORD': '1,2,3,4', '$DATATYPE': 'I', '$MODE': 'L', '$NEXTDATA': '0', '$TOT': '2', '$PAR': '3',
    '$TIMESTEP': '0.01', '$BEGINDATA': '0' * 10, '$ENDDATA': '0' * 10,
    '$P1N': 'FSC', '$P1B': '16', '$P1R': '1024', '$P1E': '0,0', '$P1G': '2',
    '$P2N': 'FL1', '$P2B': '16', '$P2R': '1024', '$P2E': '4,1',
    '$P3N': 'Time', '$P3B': '16', '$P3R': '65536', '$P3E': '0,0',
}


def encode():
    return ''.join(f'/{key}/{value}' for key, value in keys.items()).encode() + b'/'


begin = 58 + len(encode())
end = begin + len(data) - 1
keys |= {'$BEGINDATA': f'{begin:010d}', '$ENDDATA': f'{end:010d}'}
places = ''.join(f'{place:>8d}' for place in (58, begin - 1, begin, end, 0, 0))
with open('tube.fcs', 'wb') as file:
    file.write(b'FCS3.0    ' + places.encode() + encode() + data)
print('fcsparser', fcsparser.parse('tube.fcs')[1].values[0].tolist())
print('flowio', flowio.FlowData('tube.fcs').as_array(preprocess=True)[0].round(6).tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

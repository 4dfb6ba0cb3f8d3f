#!/usr/bin/env bash
# fcswrite states that a file is little endian and writes it big endian, and turns negative channels
# round.
#
# Packages: fcswrite 0.6.4, flowio 1.4.0, numpy 2.4.6.
# Behaviour: endianness='little' changes the keyword $BYTEORD alone; the numbers are packed the
#   other way. A reader follows the keyword and gets numbers near 0. By default, and as its
#   documentation says, a channel with a negative mean has its sign turned, and one within 0 and 1
#   is multiplied by 100, each by its own file: the same marker has one sign in this patient and
#   another in the next.
# Expected: the values that were given. Compensated channels have negative values, and their mean
#   depends on the patient.
# Why it matters here: a round trip through FCS changes the features of some patients and not of
#   others.
# Instead: endianness='big', compat_negative=False, compat_percent=False.
# Source: Data File Standard for Flow Cytometry, FCS 3.1, keyword $BYTEORD.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fcswrite==0.6.4' 'flowio==1.4.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
big: forward scatter [100.0, 200.0, 300.0]
little: forward scatter [7.18e-41, 2.59e-41, 5.39e-41]
CD4 after compensation: [2.5, -10.0, -40.0] written: [-2.5, 10.0, 40.0]
purity: [0.25, 1.0, 0.5] written: [25.0, 100.0, 50.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import fcswrite
import flowio
import numpy as np

events = np.array([[100.0, 2.5], [200.0, -10.0], [300.0, -40.0]])
for endianness in ('big', 'little'):
    fcswrite.write_fcs('cells.fcs', ['FSC', 'CD4'], events, endianness=endianness)
    seen = flowio.FlowData('cells.fcs').as_array(preprocess=False)
    print(f'{endianness}: forward scatter', [float(f'{value:.3g}') for value in seen[:, 0]])
fcswrite.write_fcs('cells.fcs', ['FSC', 'CD4'], events)
print('CD4 after compensation:', events[:, 1].tolist(), 'written:',
      flowio.FlowData('cells.fcs').as_array(preprocess=False)[:, 1].tolist())
shares = np.array([[100.0, 0.25], [200.0, 1.0], [300.0, 0.5]])
fcswrite.write_fcs('cells.fcs', ['FSC', 'purity'], shares)
print('purity:', shares[:, 1].tolist(), 'written:', flowio.FlowData('cells.fcs').as_array(preprocess=False)[:, 1].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# pobm numbers the desaturations of a night with 8 bits: the 129th and later ones are written over earlier ones or left
# out. A patient with 160 in eight hours has an index of 16 in place of 20, and with 200 one of 18 in place of 25.
#
# Packages: pobm 1.2.0, numpy 1.26.4.
# Behaviour: DesaturationsMeasures groups events that are close to each other and keeps the number of the group of each
#   event in an array of int8. Group 128 becomes -128. The events behind it are then written over places counted from the
#   end of the list. The oxygen desaturation index, lengths, areas and the time between events are computed from the rest.
# Expected: one group for each event, since the distance for grouping is 0 by default and the events are 100 s apart.
# Why it matters here: 128 events in eight hours are an index of 16. Patients with severe sleep apnoea, from 30 on, are
#   the ones whose index is wrong.
# Instead: compute the measures hour by hour and add the counts.
# Source: the count of the dips that were put into the signal; AASM: severe from 30 events an hour on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pobm==1.2.0'
cat > expected.txt <<'EXPECTED'
60 dips of 6 %: index of pobm 7.5 an hour, true 7.5; mean length 36 s
120 dips of 6 %: index of pobm 15.0 an hour, true 15.0; mean length 36 s
127 dips of 6 %: index of pobm 15.9 an hour, true 15.9; mean length 36 s
128 dips of 6 %: index of pobm 16.0 an hour, true 16.0; mean length 36 s
129 dips of 6 %: index of pobm 16.0 an hour, true 16.1; mean length 36 s
160 dips of 6 %: index of pobm 16.0 an hour, true 20.0; mean length 36 s
200 dips of 6 %: index of pobm 18.0 an hour, true 25.0; mean length 36 s
280 dips of 6 %: index of pobm 32.0 an hour, true 35.0; mean length 36 s
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pobm.obm.desat import DesaturationsMeasures

for dips in (60, 120, 127, 128, 129, 160, 200, 280):
    signal = np.full(8 * 3600, 96)
    for number in range(dips):
        start = 100 + 100 * number
        signal[start:start + 40] = np.concatenate([np.repeat(np.arange(95, 89, -1), 4), np.repeat(np.arange(91, 95), 4)])
    result = DesaturationsMeasures().compute(signal)
    print(f'{dips} dips of 6 %: index of pobm {result.ODI:.1f} an hour, true {dips / 8:.1f}; mean length {result.DL_u:.0f} s')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

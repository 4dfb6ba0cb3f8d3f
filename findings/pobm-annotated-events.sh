#!/usr/bin/env bash
# pobm finds no desaturation in a night whose events it is given: begin and end are accepted, checked and then dropped.
#
# Packages: pobm 1.2.0, numpy 1.26.4.
# Behaviour: DesaturationsMeasures.compute documents begin and end, the events as scored by somebody, in place of its own
#   detection. It keeps no count for them and then removes short events by going through events and counts together. Since
#   the list of counts is empty, no event remains. The index is 0 and so is everything else, without an error.
# Expected: the index and the lengths of the events that were given.
# Why it matters here: this is the way to compute the measures from the scoring of a sleep laboratory, and 0 is the result
#   of a healthy night.
# Instead: set the lists counter_desat to ones in a subclass, or compute len(begin) / len(signal) * 3600.
# Source: the docstring: "begin: Numpy array of indices of beginning of each desaturation event".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pobm==1.2.0'
cat > expected.txt <<'EXPECTED'
60 dips in 8 hours: index by hand 7.50
found by pobm: index 7.50, mean length 36 s, mean depth 5.0 %, events 60
given to pobm: index 0.00, mean length 0 s, mean depth 0.0 %, events 0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pobm.obm.desat import DesaturationsMeasures

signal = np.full(8 * 3600, 96)
begin = np.arange(100, 100 + 400 * 60, 400)
end = begin + 40
for start in begin:
    signal[start:start + 40] = np.concatenate([np.repeat(np.arange(95, 89, -1), 4), np.repeat(np.arange(91, 95), 4)])
found = DesaturationsMeasures().compute(signal)
given = DesaturationsMeasures().compute(signal, begin=begin, end=end)
print(f'60 dips in 8 hours: index by hand {len(begin) / len(signal) * 3600:.2f}')
for name, result in (('found by pobm', found), ('given to pobm', given)):
    print(f'{name}: index {result.ODI:.2f}, mean length {result.DL_u:.0f} s, mean depth {result.DDmax_u:.1f} %, events {len(result.begin)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

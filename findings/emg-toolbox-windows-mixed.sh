#!/usr/bin/env bash
# The table of features of emg-toolbox gives the values of a window to another one.
#
# Packages: emg-toolbox 1.1.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, seaborn 0.13.2,
#   matplotlib 3.9.4.
# Behaviour: extract_all_features computes the windows of a recording in threads and collects the
#   results as they are completed, an order that differs from run to run. It sets them beside the
#   beginnings and ends of the windows in the order of the recording. Of a muscle that contracts more
#   and more, most rows hold the features of another window than they state.
# Expected: the features of the window from start to end.
# Instead: sliding_window with one feature at a time, which keeps the order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'seaborn==0.13.2' 'matplotlib==3.9.4' 'emg-toolbox==1.1.0'
cat > expected.txt <<'EXPECTED'
windows of a muscle that contracts more and more: 60
each value belongs to some window: True; more than half of them to another one than stated: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from emg_toolbox.features import extract_all_features, fRMS

random = np.random.default_rng(0)
effort = np.linspace(0.1, 2, 60_000)
signal = effort * random.normal(size=effort.size)
right = np.array([fRMS(signal[start:start + 1000]) for start in range(0, signal.size, 1000)])
wrong = []
for _ in range(5):
    rows = extract_all_features(signal, 1000, window_size=1000)
    start, seen = rows[:, 0].astype(int), rows[:, 2]
    wrong.append(np.mean(~np.isclose(seen, right[start // 1000])))
    assert np.allclose(np.sort(seen), np.sort(right))
print('windows of a muscle that contracts more and more:', len(right))
print('each value belongs to some window: True; more than half of them to another one than stated:', min(wrong) > 0.5)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

#!/usr/bin/env bash
# wfdb averages the samples of a frame by default, the marker of a missing sample with them.
#
# Packages: wfdb 4.3.1, numpy 2.4.6.
# Behaviour: where a signal has several samples a frame, rdrecord returns their mean. A missing
#   sample is stored as the lowest code; the mean of that code and 1 mV is -81.42 mV, and no NaN is
#   left to show it.
# Expected: NaN, or the mean of the samples that are there.
# Instead: rdrecord(..., smooth_frames=False) and e_p_signal, which keeps NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'wfdb==4.3.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
written [0.0, 1.0, 0.0, 1.0, nan, 1.0, 0.0, 1.0]
default [0.5, 0.5, -81.42, 0.5]
smooth_frames=False [0.0, 1.0, 0.0, 1.0, nan, 1.0, 0.0, 1.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import wfdb

lead = np.array([0.0, 1.0, 0.0, 1.0, np.nan, 1.0, 0.0, 1.0])
slow = np.ones(4)
wfdb.wrsamp(
    'visit', fs=4, units=['mV', 'mV'], sig_name=['lead', 'slow'], e_p_signal=[lead, slow],
    samps_per_frame=[2, 1], fmt=['16', '16'], adc_gain=[200.0, 200.0], baseline=[0, 0],
)
print('written', lead.tolist())
print('default', wfdb.rdrecord('visit').p_signal[:, 0].tolist())
print('smooth_frames=False', wfdb.rdrecord('visit', smooth_frames=False).e_p_signal[0].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

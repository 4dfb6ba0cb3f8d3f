#!/usr/bin/env bash
# openvital carries the pulse pressure variation of one patient into the next one.
#
# Packages: openvital 0.2.1, openecg 0.11.0, opendsp 0.1.0, numpy 2.2.6, scipy 1.15.3.
# Behaviour: the filter for pulse pressure variation smooths with its last value, which it keeps in a
#   variable of the module. It is not set back for another patient, nor for another recording. A
#   breath within 1 % of the last value is given that value, others are averaged with it, and those
#   further off than 25 % are left out, so that the patient before stays in the median.
# Expected: the value of a window depends on the recording that it is from.
# Why it matters here: a variation above 13 % decides whether a patient is given fluid.
# Instead: openvital.filters.abp_ppv.last_ppv = 0 and last_spv = 0 before each recording.
# Source: its own reference, Aboy et al. 2009, which starts anew.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'openvital==0.2.1' 'openecg==0.11.0' 'opendsp==0.1.0'
cat > expected.txt <<'EXPECTED'
patient with 12 % alone: 10.8 %
patient with 12 % after one with 6 %: 9.5 %
patient with 12 % after one with 18 %: 11.3 %
patient with 12 % after one with 24 %: 11.6 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from openvital.filters import abp_ppv

rate = 100
time = np.arange(60 * rate) / rate


def pressure(variation):  # 75 beats and 15 breaths a minute
    beat = (time * 1.25) % 1
    pulse = np.exp(-0.5 * ((beat - 0.25) / 0.09) ** 2) + 0.25 * np.exp(-0.5 * ((beat - 0.55) / 0.1) ** 2)
    return 70 + 45 * pulse * (1 + variation / 200 * np.sin(2 * np.pi * 0.25 * time))


def variation(recording):
    result = abp_ppv.run({'ART': {'vals': recording, 'srate': rate}}, {}, abp_ppv.cfg)
    return f'{result[0][0]["val"]:.1f} %'


def anew():
    abp_ppv.last_ppv = abp_ppv.last_spv = 0


for other in (None, 6, 18, 24):
    anew()
    if other:
        variation(pressure(other))
    print('patient with 12 %', f'after one with {other} %:' if other else 'alone:', variation(pressure(12)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

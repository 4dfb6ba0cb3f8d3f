#!/usr/bin/env bash
# openvital carries the pulse pressure variation and the propofol of one patient into the next one.
#
# Packages: openvital 0.2.1, openecg 0.11.0, opendsp 0.1.0, numpy 2.2.6, scipy 1.15.3.
# Behaviour: the filter for pulse pressure variation smooths with its last value, which it keeps in a
#   variable of the module. It is not set back for another patient, nor for another recording. A
#   breath within 1 % of the last value is given that value, others are averaged with it, and those
#   further off than 25 % are left out, so that the patient before stays in the median. The
#   compartment model keeps the amounts of the drug and the volume of the pump in the same way.
# Expected: the value of a window depends on the recording that it is from; 0 without a dose.
# Why it matters here: a variation above 13 % decides whether a patient is given fluid.
# Instead: set each last_ variable of openvital.filters.abp_ppv and pkpd_3comp to 0 before a recording.
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
propofol without a dose: 0.0
after 5 mL within 10 seconds: 21.9
the next patient, without a dose: 18.8
the next patient, after 1 mL: -0.2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from openvital.filters import abp_ppv, pkpd_3comp

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



def concentration(volumes):
    pump = [{'dt': second + 1, 'val': volume} for second, volume in enumerate(volumes)]
    inputs = {'PUMP1_VOL': pump, 'PUMP1_CONC': [{'dt': 0, 'val': 20.0}]}
    options = {'model': 'Schnider', 'age': 50, 'sex': 'M', 'wt': 70, 'ht': 175}
    return f'{pkpd_3comp.run(inputs, options, pkpd_3comp.cfg)[0][-1]["val"]:.1f}'


print('propofol without a dose:', concentration([0] * 10))
print('after 5 mL within 10 seconds:', concentration([0.5 * (second + 1) for second in range(10)]))
print('the next patient, without a dose:', concentration([0] * 10))
print('the next patient, after 1 mL:', concentration([1] * 10))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

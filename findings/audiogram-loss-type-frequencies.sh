#!/usr/bin/env bash
# audiogram calls a moderate conductive hearing loss normal, since it finds the grade with four frequencies and the kind of
# the loss with three of them.
#
# Packages: audiogram 0.1.0.
# Behaviour: for the default standard who2021, severity and the mean air-bone gap use 500, 1000, 2000 and 4000 Hz, as
#   documented. loss_type compares this gap with a mean of 500, 1000 and 2000 Hz, which is compared with 25 dB. Where
#   mainly the high frequencies are lost, as in age and noise, one ear is "moderate" and "normal" in the same summary.
# Expected: one mean for one standard, as with aao_hns, where all of them use the same four frequencies.
# Instead: pass the means of four frequencies to metrics.loss_type, as in this script.
# Source: the README of the package: "WHO 2021 default: 500/1000/2000/4000".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'audiogram==0.1.0'
cat > expected.txt <<'EXPECTED'
flat: grade moderate at 45.0 dB, kind sensorineural; with four frequencies sensorineural; aao_hns sensorineural
noise: grade mild at 37.5 dB, kind normal; with four frequencies sensorineural; aao_hns sensorineural
high, conductive: grade moderate at 41.2 dB, kind normal; with four frequencies conductive; aao_hns conductive
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from audiogram import EarAudiogram, loss_type

ears = {
    'flat': ({500: 45, 1000: 45, 2000: 45, 4000: 45}, {500: 45, 1000: 45, 2000: 45, 4000: 45}),
    'noise': ({500: 15, 1000: 20, 2000: 35, 4000: 80}, {500: 15, 1000: 20, 2000: 35, 4000: 75}),
    'high, conductive': ({500: 15, 1000: 20, 2000: 40, 4000: 90}, {500: 10, 1000: 10, 2000: 15, 4000: 40}),
}
for name, (air, bone) in ears.items():
    ear = EarAudiogram(air=air, bone=bone)
    four = loss_type(ear.pta(standard='4tone'), ear.pta(standard='4tone', pathway='bone'), ear.abg_pta())
    print(f"{name}: grade {ear.severity()} at {ear.pta(standard='4tone'):.1f} dB, kind {ear.loss_type()};",
          f'with four frequencies {four}; aao_hns {ear.loss_type(standard="aao_hns")}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

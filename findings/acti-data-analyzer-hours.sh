#!/usr/bin/env bash
# The intradaily variability of acti-data-analyzer depends on the length of its epochs, and its most
# active ten hours are not ten hours in a row.
#
# Packages: acti-data-analyzer 1.0.4, numpy 2.3.5, scipy 1.16.3, pandas 2.3.3, matplotlib 3.10.7.
# Behaviour: SimpleNonparametric names a source in which all measures are taken from means of an hour. It
#   computes the interdaily stability from these and the intradaily variability from the epochs: the
#   same hours have 0.01 in minutes and 0.29 in half hours, where 0.58 is right. L5 and M10 are means of
#   the five lowest and the ten highest hours of the mean day, wherever they are: a nap at noon counts
#   for the night and is left out of the day.
# Expected: measures that do not depend on the epochs, of hours that follow each other.
# Instead: pass means of an hour for the variability, and compute L5 and M10 from running means.
# Source: Witting et al., Alterations in the circadian rest-activity rhythm in aging and Alzheimer's
#   disease, 1990; Van Someren et al., 1999.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.3.5' 'scipy==1.16.3' 'pandas==2.3.3' 'matplotlib==3.10.7' 'acti-data-analyzer==1.0.4'
cat > expected.txt <<'EXPECTED'
epochs of 60 s: IV 0.0097, L5 4.9, M10 69.8
epochs of 300 s: IV 0.0483, L5 4.9, M10 69.8
epochs of 1800 s: IV 0.2901, L5 4.9, M10 69.8
by their definition: IV 0.5810, L5 5.5, M10 55.8
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ada.data_containers.generic import GenericData
from ada.long.nonparametric import SimpleNonparametric

random = np.random.default_rng(0)
day = np.array([5] * 7 + [60, 90, 80, 70, 60, 50] + [4, 4] + [60, 70, 80, 70, 60, 50, 40, 30, 20], dtype=float)
hours = np.clip(np.tile(day, 14) + random.normal(0, 8, 14 * 24), 0, None)

def by_hour(values):
    variability = np.sum(np.diff(values) ** 2) / (values.size - 1) / np.var(values)
    profile = values.reshape(-1, 24).mean(axis=0)
    runs = {length: [np.roll(profile, -start)[:length].mean() for start in range(24)] for length in (5, 10)}
    return variability, min(runs[5]), max(runs[10])

for seconds in (60, 300, 1800):
    repeat = 3600 // seconds
    activity = np.repeat(hours, repeat)
    times = np.arange(activity.size) * float(seconds)
    data = GenericData(np.vstack([times, activity]), {'mesa_id': '1'}, 1 / seconds, ['timestamp', 'activity'])
    seen = SimpleNonparametric().fit(data, 'activity').fit_params
    print(f"epochs of {seconds} s: IV {seen['IV']:.4f}, L5 {seen['L5']:.1f}, M10 {seen['M10']:.1f}")
variability, least, most = by_hour(hours)
print(f'by their definition: IV {variability:.4f}, L5 {least:.1f}, M10 {most:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }

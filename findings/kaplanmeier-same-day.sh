#!/usr/bin/env bash
# The curve of kaplanmeier for methodtype="custom" takes people who leave the study on the day of a death out
# of those at risk: with whole years, survival is 6 % in place of 57 %.
#
# Packages: kaplanmeier 0.2.0, lifelines 0.30.3, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2,
#   seaborn 0.13.2.
# Behaviour: the rows are sorted by time and then by event, 0 before 1, so that somebody who is censored in
#   a month is not at risk for the deaths of this month. The rows of a month are then taken one by one.
# Expected: the estimator of Kaplan and Meier, by which deaths come before censorings of the same time, as
#   methodtype="lifeline" of the same package draws it.
# Why it matters here: times in whole days, months or years have many equal values.
# Instead: methodtype="lifeline", the default.
# Source: Kaplan and Meier, Nonparametric estimation from incomplete observations, 1958, part 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2' 'seaborn==0.13.2' 'lifelines==0.30.3' 'kaplanmeier==0.2.0'
cat > expected.txt <<'EXPECTED'
exact times: custom 54.8 %, by hand 54.8%, lifelines 54.8%
whole months: custom 48.4 %, by hand 48.8%, lifelines 48.8%
whole quarters: custom 57.7 %, by hand 58.1%, lifelines 58.1%
whole years: custom 5.7 %, by hand 57.4%, lifelines 57.4%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import kaplanmeier
import matplotlib.pyplot as plt
import numpy as np
from lifelines import KaplanMeierFitter


def compute_by_hand(times, events):
    survival = 1.0
    for time in sorted(set(times)):
        at_risk = np.sum(times >= time)
        survival *= 1 - np.sum(events[times == time]) / at_risk
    return survival


def read_lowest(times, events):
    fitted = kaplanmeier.fit(times, events, np.repeat('all', len(times)))
    plt.show = lambda: None
    kaplanmeier.plot(fitted, methodtype='custom', visible=True)
    axes = plt.gcf().axes[0]
    lines = [line.get_segments()[0] for line in axes.collections]
    levels = [line[0, 1] for line in lines if line[0, 1] == line[1, 1]]
    plt.close('all')
    return min(levels)


random = np.random.default_rng(0)
exact = random.exponential(20, 100)
for name, width in (('exact times', 0.0001), ('whole months', 1.0), ('whole quarters', 3.0), ('whole years', 12.0)):
    times = np.ceil(np.minimum(exact, 24) / width) * width
    leave = random.random(100) < 0.4
    events = (~leave & (exact < 24)).astype(int)
    right = KaplanMeierFitter().fit(times, events).survival_function_.iloc[-1, 0]
    print(f'{name}: custom {read_lowest(times, events):.1f} %, by hand {compute_by_hand(times, events):.1%}, '
          f'lifelines {right:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
